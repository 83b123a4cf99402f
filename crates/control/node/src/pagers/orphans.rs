//! The pagers that the node before this one has left.
//!
//! Each hands over what it is and all of its descriptors, and is supervised like any other from
//! then on. One that is killed before all of it has come is lost with its program, as it would have
//! been without a node: what has come is let go of, and the helpers in the program end it.

use super::{ConsumerReport, LastWord, Launcher, OnEnd, Pager, PagerError, PagerState, Pagers};
use crate::causes::with_causes;
use crate::children::adopt::{Adopted, adopt};
use crate::children::held::HeldFds;
use crate::cluster::report::check_name;
use crate::node_dir::NodeDir;
use crate::socket::message::PagerAddress;
use hecaton_memory::SpaceId;
use hecaton_pager::{PagerEvent, PagerLeft};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

/// How long the launcher of an adopted pager may take until it is back. One that is not there by
/// then has ended, or cannot come back: it will start no further program.
const LAUNCHER_PATIENCE: Duration = Duration::from_secs(10);

/// A virtual machine whose pager was taken over.
#[derive(Debug)]
pub(crate) struct LeftVm {
    /// Its name.
    pub(crate) name: String,
    /// Where its monitor listens.
    pub(crate) monitor: Option<PathBuf>,
    /// Its memory is being brought home.
    pub(crate) leaving: bool,
}

impl Pagers {
    /// Takes over all pagers that wait in `dir`, and tells which of them serve machines. Numbers
    /// that have sockets there are not used again, whoever has them.
    pub(crate) fn adopt_left(&self, dir: &NodeDir) -> Vec<LeftVm> {
        let numbers = dir.pager_numbers();
        self.table().started = numbers.last().copied().unwrap_or(0);
        let mut machines = Vec::new();
        let Some(patience) = self.0.adopt_within else { return machines };
        for number in numbers {
            let socket = dir.paths().pager_adoption(number);
            match adopt::<PagerLeft>(&socket, patience) {
                Ok(Some(orphan)) => machines.extend(self.take_over(orphan, number)),
                Ok(None) => {}
                Err(error) => tracing::error!(error = with_causes(&error), "a pager is left alone"),
            }
        }
        if self.count() == 0 {
            return machines;
        }
        let pagers = self.clone();
        let waiting = move || pagers.give_up_launchers();
        if let Err(error) = thread::Builder::new().name("launchers".into()).spawn(waiting) {
            tracing::error!(%error, "pagers whose launchers have gone do not end by themselves");
        }
        machines
    }

    /// A launcher is back that an earlier node has told of this pager. `on_end` is called when the
    /// pager has ended.
    pub(crate) fn resume(
        &self,
        known: &PagerAddress,
        on_end: OnEnd,
    ) -> Result<PagerAddress, PagerError> {
        let resumed = self.with(&known.name, |pager| {
            if pager.config.socket != known.socket {
                return None;
            }
            pager.launcher = Launcher(Some(on_end));
            let pid = pager.report.pid.unwrap_or(known.pid);
            Some(PagerAddress { pid, ..known.clone() })
        })?;
        resumed.ok_or_else(|| PagerError::Unknown(known.name.clone()))
    }

    fn take_over(&self, orphan: Adopted<PagerLeft>, number: u32) -> Option<LeftVm> {
        let config = &orphan.word.start.config;
        let name = config.consumer.clone();
        let machine = config.guest.is_some().then(|| LeftVm {
            name: name.clone(),
            monitor: config.monitor.clone(),
            leaving: orphan.word.leaving,
        });
        let pid = orphan.child.process.pid();
        match self.try_take_over(orphan, number) {
            Ok(()) => {
                tracing::info!(consumer = name, pid, "took over the pager of the node before");
                machine
            }
            Err(error) => {
                let error = with_causes(&error);
                tracing::error!(consumer = name, pid, error, "a pager is not taken over");
                None
            }
        }
    }

    fn try_take_over(&self, mut orphan: Adopted<PagerLeft>, number: u32) -> Result<(), PagerError> {
        let held = receive_held(&mut orphan)?;
        let (child, left) = orphan.settled()?;
        let mut config = left.start.config;
        let name = config.consumer.clone();
        check_name(&name)?;
        check_place(&config.socket, &self.0.paths.pager_socket(number))?;
        config.site = self.0.donors.site().clone();
        config.node = Some(self.0.paths.control_socket());
        config.outlive = self.outlive(number);
        let state = if left.launch_over { PagerState::Ending } else { PagerState::Serving };
        let report = ConsumerReport {
            name: name.clone(),
            space: SpaceId(config.space),
            state,
            restarts: left.restarts,
            local_bytes: config.local_bytes,
            ..ConsumerReport::default()
        };
        let mut pager = Pager {
            config,
            report,
            held,
            target: None,
            launch_line: None,
            launch_over: left.launch_over,
            launcher: Launcher::default(),
            last_word: LastWord::None,
        };
        pager.enter(&child.process);
        {
            let mut table = self.table();
            table.check_free(&name)?;
            table.pagers.insert(name.clone(), pager);
        }
        let supervisor = {
            let (pagers, name) = (self.clone(), name.clone());
            move || {
                // It listens already, and nobody waits to hear of it.
                let (decided, _outcome) = mpsc::sync_channel(1);
                pagers.supervise(&name, Some(child), &decided);
            }
        };
        let spawned = thread::Builder::new().name("pager-supervisor".into()).spawn(supervisor);
        if let Err(error) = spawned {
            self.forget(&name);
            return Err(error.into());
        }
        Ok(())
    }

    fn give_up_launchers(&self) {
        if self.0.stop.wait(LAUNCHER_PATIENCE) {
            return;
        }
        let is_alone = |pager: &Pager| pager.launcher.0.is_none() && !pager.launch_over;
        let table = self.table();
        let alone = table.pagers.iter().filter(|(_, pager)| is_alone(pager));
        let alone: Vec<String> = alone.map(|(name, _)| name.clone()).collect();
        drop(table);
        alone.iter().for_each(|name| self.launch_over(name));
    }
}

/// The descriptors that come behind the pager's word.
fn receive_held(orphan: &mut Adopted<PagerLeft>) -> io::Result<HeldFds> {
    let mut held = HeldFds::default();
    while held.len() < orphan.word.start.held {
        let event = orphan.child.receiver.receive()?.ok_or(io::ErrorKind::UnexpectedEof)?;
        let PagerEvent::HoldFds(labels) = event else {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "not what was announced"));
        };
        let fds = orphan.child.receiver.take_fds(labels.len())?;
        let before = held.len();
        held.hold(labels, fds).map_err(io::Error::other)?;
        if held.len() == before {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "fewer came than announced"));
        }
    }
    Ok(held)
}

/// Programs attach where the directory says that they do: another pager's word is not taken for it.
fn check_place(said: &Path, expected: &Path) -> io::Result<()> {
    if said == expected {
        return Ok(());
    }
    let reason = format!("it listens at {}, not at {}", said.display(), expected.display());
    Err(io::Error::new(io::ErrorKind::InvalidData, reason))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::channel::{self, Receiver};
    use crate::children::child::{AdoptedChild, Conversation, Running};
    use hecaton_pager::{PagerConfig, PagerStart};
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    /// A pager that says that it holds `held` descriptors, and the other end of its stream.
    fn left(held: usize) -> (Adopted<PagerLeft>, UnixStream) {
        let (stream, pagers) = UnixStream::pair().expect("a socket pair");
        let config = PagerConfig::new("a".into(), 1, 1 << 24, "/nowhere".into());
        let start = PagerStart { config, held };
        let word = PagerLeft { start, restarts: 0, launch_over: false, leaving: false };
        let process = AdoptedChild::open(rustix::process::getpid()).expect("it is there");
        let receiver = Receiver::new(stream.try_clone().expect("a descriptor"));
        let child = Conversation { process: Running::Adopted(process), stream, receiver };
        (Adopted { child, word }, pagers)
    }

    fn send(pager: &UnixStream, labels: &[&str]) {
        let file = tempfile::tempfile().expect("a file");
        let fds: Vec<_> = labels.iter().map(|_| file.as_fd()).collect();
        let labels = labels.iter().map(|&label| label.to_owned()).collect();
        channel::send(pager, &PagerEvent::HoldFds(labels), &fds).expect("sent");
    }

    #[test]
    fn all_that_was_announced_is_held() {
        let (mut orphan, pager) = left(3);
        send(&pager, &["state", "listener"]);
        send(&pager, &["uffd-1"]);
        let held = receive_held(&mut orphan).expect("held");
        let labels: Vec<_> = held.iter().map(|(label, _)| label).collect();
        assert_eq!(labels, ["state", "listener", "uffd-1"]);
    }

    #[test]
    fn a_hand_over_that_is_cut_short_or_is_none_is_no_hand_over() {
        let (mut orphan, pager) = left(3);
        send(&pager, &["state", "listener"]);
        drop(pager);
        assert!(receive_held(&mut orphan).is_err());
        let (mut orphan, pager) = left(3);
        send(&pager, &["state", "listener"]);
        send(&pager, &["state"]);
        assert!(receive_held(&mut orphan).is_err());
        let (mut orphan, pager) = left(1);
        channel::send(&pager, &PagerEvent::Over, &[]).expect("sent");
        assert!(receive_held(&mut orphan).is_err());
    }
}
