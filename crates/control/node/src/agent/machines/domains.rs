//! Which domains of libvirt run here, on a thread of its own: it waits for libvirt, and nobody
//! waits for it.
//!
//! libvirt does not say which process a domain is; it is the one whose command line has the
//! domain's UUID. From then on the process tells whether the domain runs, also while libvirt says
//! nothing.

use crate::agent::links::monitor::PATIENCE;
use crate::agent::machines::process::ProcessId;
use crate::stop::{Bell, Stop};
use hecaton_vm::domain::harvest::Domain;
use hecaton_vm::virsh::{Virsh, VirshError};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use std::{fs, io, thread};

/// How often libvirt is asked.
const INTERVAL: Duration = Duration::from_secs(1);

/// Most domains of a host.
const MAX_DOMAINS: usize = 1024;

/// The domains. The thread ends with it, as soon as libvirt has answered or is not waited for any
/// more.
#[derive(Debug)]
pub(crate) struct Domains(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    virsh: Virsh,
    desk: Mutex<Desk>,
    bell: Bell,
    stop: Stop,
}

#[derive(Debug, Default)]
struct Desk {
    found: BTreeMap<String, Found>,
    /// Why libvirt says nothing.
    failure: Option<String>,
    /// It has listed its domains, or failed to.
    is_decided: bool,
    /// It is not asked, for it would not answer.
    is_paused: bool,
}

/// At which look it is said that a domain's process is not there.
const MISSED_LOOKS: u32 = 3;

/// A domain that runs.
#[derive(Clone, Debug)]
pub(crate) struct Found {
    pub(crate) domain: Domain,
    pub(crate) process: ProcessId,
}

impl Domains {
    /// Those of this libvirt.
    pub(crate) fn start(virsh: Virsh) -> io::Result<Domains> {
        let desk = Mutex::default();
        let (bell, stop) = (Bell::default(), Stop::default());
        let shared = Arc::new(Shared { virsh, desk, bell, stop });
        let thread = thread::Builder::new().name("agent-libvirt".into());
        thread.spawn({
            let shared = Arc::clone(&shared);
            move || shared.run()
        })?;
        Ok(Domains(shared))
    }

    pub(crate) fn virsh(&self) -> &Virsh {
        &self.0.virsh
    }

    /// Those that were found, and run.
    pub(crate) fn found(&self) -> Vec<Found> {
        let mut desk = self.0.desk();
        desk.found.retain(|_, found| found.process.is_alive());
        desk.found.values().cloned().collect()
    }

    /// Whether libvirt has said which there are, or nothing.
    pub(crate) fn is_decided(&self) -> bool {
        self.0.desk().is_decided
    }

    /// Why libvirt says nothing, if so.
    pub(crate) fn failure(&self) -> Option<String> {
        self.0.desk().failure.clone()
    }

    /// As long as a domain waits in one of libvirt's hooks it lists none, and each question would
    /// hold one of its threads.
    pub(crate) fn pause(&self, is_paused: bool) {
        if std::mem::replace(&mut self.0.desk().is_paused, is_paused) && !is_paused {
            self.0.bell.ring();
        }
    }
}

impl Drop for Domains {
    fn drop(&mut self) {
        self.0.stop.set();
        self.0.bell.ring();
    }
}

impl Shared {
    fn desk(&self) -> MutexGuard<'_, Desk> {
        self.desk.lock().expect("no thread panics with the desk")
    }

    fn run(&self) {
        let mut unseen = BTreeMap::new();
        let mut last = String::new();
        while !self.stop.is_set() {
            let is_paused = self.desk().is_paused;
            if !is_paused {
                match self.look(&mut unseen, &mut last) {
                    Ok(()) => self.answers(None),
                    // This is the end.
                    Err(VirshError::Ended(_)) => {}
                    Err(error) => self.answers(Some(error.to_string())),
                }
            }
            self.bell.wait(INTERVAL);
        }
    }

    /// Notes whether libvirt answers. That it does not any more is said once, whatever reasons
    /// follow.
    fn answers(&self, failure: Option<String>) {
        let mut desk = self.desk();
        desk.is_decided = true;
        let uri = self.virsh.uri();
        match &failure {
            _ if desk.failure.is_some() == failure.is_some() => {}
            Some(reason) => tracing::warn!(
                uri,
                reason,
                "libvirt says nothing; its domains count as they did, and new ones as other use"
            ),
            None => tracing::info!(uri, "libvirt answers"),
        }
        desk.failure = failure;
    }

    /// Which domains there are. Each that is new is read, and of the others one, as marks and
    /// memory may change.
    fn look(
        &self,
        unseen: &mut BTreeMap<String, u32>,
        last: &mut String,
    ) -> Result<(), VirshError> {
        let listed = self.ask(&["list", "--uuid"])?;
        let listed: Vec<&str> = listed.split_whitespace().take(MAX_DOMAINS).collect();
        let known: BTreeSet<String> = self.desk().found.keys().cloned().collect();
        let again = known.range(last.clone()..).find(|uuid| **uuid != *last);
        let again = again.or_else(|| known.first()).cloned().unwrap_or_default();
        unseen.retain(|uuid, _| listed.contains(&uuid.as_str()));
        for uuid in listed {
            if known.contains(uuid) && uuid != again {
                continue;
            }
            let xml = match self.ask(&["dumpxml", "--domain", uuid]) {
                Ok(xml) => xml,
                // It has ended meanwhile, as the next list will say.
                Err(VirshError::Failed { .. }) => continue,
                Err(error) => return Err(error),
            };
            match Domain::read(&xml).map_err(|error| error.to_string()).and_then(seen) {
                Ok(found) => drop(self.desk().found.insert(uuid.to_owned(), found)),
                Err(reason) => {
                    // One that starts, or ends, has no process for a moment.
                    let looks = unseen.entry(uuid.to_owned()).or_insert(0u32);
                    *looks = looks.saturating_add(1);
                    if *looks == MISSED_LOOKS {
                        tracing::warn!(
                            uuid,
                            reason,
                            "a domain is left out, and counts as other use"
                        );
                    }
                }
            }
        }
        *last = again;
        Ok(())
    }

    fn ask(&self, words: &[&str]) -> Result<String, VirshError> {
        self.virsh.ask(words, PATIENCE, || {
            // It was asked as a domain came to wait in a hook, and answers when that has ended.
            if !self.desk().is_paused {
                let seconds = PATIENCE.as_secs();
                self.answers(Some(format!("`virsh {}` has no answer after {seconds} s", words[0])));
            }
            !self.stop.is_set()
        })
    }
}

fn seen(domain: Domain) -> Result<Found, String> {
    let process = process_of(&domain.uuid).ok_or_else(|| {
        format!(
            "no process here has `-uuid {}` on its command line; libvirt runs on another host, or in another process namespace",
            domain.uuid
        )
    })?;
    Ok(Found { domain, process })
}

/// The process that has this UUID on its command line. If several have it, returns the latest: the
/// others are left over from a libvirt that has lost them.
fn process_of(uuid: &str) -> Option<ProcessId> {
    let has_uuid = |pid: &u32| {
        let Ok(line) = fs::read(format!("/proc/{pid}/cmdline")) else { return false };
        let words: Vec<&[u8]> = line.split(|byte| *byte == 0).collect();
        words.windows(2).any(|pair| pair == [b"-uuid".as_slice(), uuid.as_bytes()])
    };
    let entries = fs::read_dir("/proc").ok()?.flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter(has_uuid).filter_map(ProcessId::of).max_by_key(ProcessId::started)
}

#[cfg(test)]
mod tests {
    use super::*;
    use hecaton_testkit::wait_until;
    use std::os::unix::process::CommandExt as _;
    use std::process::{Command, Stdio};

    #[test]
    fn a_domains_process_is_known_by_its_uuid() {
        let uuid = "0d5a4f7e-8f4e-4d43-9c07-5a0f3f6f0a11";
        assert_eq!(process_of(uuid), None);
        let mut other = Command::new("sleep").arg("600").arg0(uuid).spawn().expect("started");
        let mut child = Command::new("sh");
        child.args(["-c", "read -r line", "qemu", "-uuid", uuid]).stdin(Stdio::piped());
        let mut child = child.spawn().expect("started");
        // It is this program until it has executed the other one.
        wait_until("the domain's process is found", || process_of(uuid).is_some());
        assert_eq!(process_of(uuid), ProcessId::of(child.id()));
        let mut later = Command::new("sh");
        later.args(["-c", "read -r line", "qemu", "-uuid", uuid]).stdin(Stdio::piped());
        // Not within the same tick of the clock.
        thread::sleep(Duration::from_millis(50));
        let mut later = later.spawn().expect("started");
        wait_until("the later process is found", || process_of(uuid) == ProcessId::of(later.id()));
        for child in [&mut later, &mut child, &mut other] {
            child.kill().expect("killed");
            child.wait().expect("ended");
        }
        assert_eq!(process_of(uuid), None);
    }
}
