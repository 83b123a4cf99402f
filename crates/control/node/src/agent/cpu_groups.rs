//! Divides processor time among machines by the weights of cpu cgroups, version 1 or 2.
//!
//! Each machine has a group of its own under one group of the agent. The weights of these groups
//! are in proportion to the machines' cores. The kernel divides contended time by weight, and gives
//! idle time to any machine that wants it. So a harvest VM gets the time that others leave, from
//! one tick of the scheduler to the next. The kernel decides this alone, also while no agent runs.
//! Both alternatives withhold time that no other machine wants. Exclusive processors (cpusets)
//! stand idle when their machine does. A quota stops all processors of a machine for the rest of a
//! period.
//!
//! Version 2 has one hierarchy for all controllers, so a container with cores has one group for its
//! memory and its weight. That group is under the agent's group. At the root its weight would
//! compete with the weight of all machines together.

use crate::agent::machines::process::ProcessId;
use crate::causes::with_causes;
use hecaton_memory::cgroup::enable;
use rustix::io::Errno;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Where control groups are.
pub(super) const CGROUPS: &str = "/sys/fs/cgroup";

/// Prefix of the machines' groups. No interface file of the kernel begins with it.
const PREFIX: &str = "vm-";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    V1,
    V2,
}

impl Version {
    fn file(self) -> &'static str {
        match self {
            Version::V1 => "cpu.shares",
            Version::V2 => "cpu.weight",
        }
    }

    /// The weight of a group of which nobody has said anything; in version 1 also that of a process
    /// beside groups.
    fn usual_weight(self) -> u64 {
        match self {
            Version::V1 => 1024,
            Version::V2 => 100,
        }
    }

    fn weights(self) -> std::ops::RangeInclusive<u64> {
        match self {
            Version::V1 => 2..=262_144,
            Version::V2 => 1..=10_000,
        }
    }
}

/// The groups of an agent's machines.
#[derive(Debug)]
pub(super) struct CpuGroups {
    version: Version,
    /// The agent's own, and the one that it is in.
    path: PathBuf,
    root: PathBuf,
    cores: u32,
}

impl CpuGroups {
    /// Those under a group of this name, for machines that together have so many cores at the most.
    /// `cgroups` is [`CGROUPS`] on a real host. Nothing is made yet; the reason if there is no
    /// controller.
    pub(super) fn find(cgroups: &Path, name: &str, cores: u32) -> Result<CpuGroups, String> {
        // On a host with both versions, version 2 has the controllers that version 1 leaves.
        let unified = [cgroups.to_owned(), cgroups.join("unified")];
        let is_here = |root: &PathBuf| has_word(&root.join("cgroup.controllers"), "cpu");
        let (version, root) = if cgroups.join("cpu").join(Version::V1.file()).exists() {
            (Version::V1, cgroups.join("cpu"))
        } else if let Some(root) = unified.into_iter().find(is_here) {
            (Version::V2, root)
        } else {
            return Err(format!("there is no cpu controller under {}", cgroups.display()));
        };
        Ok(CpuGroups { version, path: root.join(name), root, cores })
    }

    /// The agent's own group.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Whether this group is of the same hierarchy: a process is in one group of it only.
    pub(super) fn are_beside(&self, group: &Path) -> bool {
        group.starts_with(&self.root)
    }

    /// A machine's group, whether it is there or not.
    pub(super) fn group_of(&self, machine: &str) -> PathBuf {
        self.path.join(format!("{PREFIX}{machine}"))
    }

    /// Has a machine's process in its group, with the weight of its cores, whatever was there
    /// before. A process that has ended is in none, and what it has left stays where it is.
    pub(super) fn enter(
        &self,
        machine: &str,
        cores: u32,
        process: ProcessId,
    ) -> Result<(), String> {
        self.make_own()?;
        let group = self.group_of(machine);
        make(&group)?;
        write(&group.join(self.version.file()), self.weight(cores))?;
        if !process.is_alive() {
            // Its number may be another's.
            return Ok(());
        }
        let (procs, pid) = (group.join("cgroup.procs"), process.pid);
        match fs::write(&procs, pid.to_string()) {
            Err(error) if Errno::from_io_error(&error) != Some(Errno::SRCH) => {
                Err(format!("cannot move process {pid} into {}: {error}", procs.display()))
            }
            _ => Ok(()),
        }
    }

    /// Gives a group that is made for a machine otherwise, and has its processes, the weight of its
    /// cores.
    pub(super) fn weigh(&self, group: &Path, cores: u32) -> Result<(), String> {
        self.make_own()?;
        write(&group.join(self.version.file()), self.weight(cores))
    }

    fn make_own(&self) -> Result<(), String> {
        self.divide(&self.root)?;
        make(&self.path)?;
        self.divide(&self.path)?;
        write(&self.path.join(self.version.file()), self.own_weight())
    }

    /// Lets the groups in this one have weights; those of version 1 always have.
    fn divide(&self, group: &Path) -> Result<(), String> {
        match self.version {
            Version::V1 => Ok(()),
            Version::V2 => enable(group, "cpu").map_err(|error| with_causes(&error)),
        }
    }

    /// Removes groups of machines that are not there any more, and with the last one the agent's
    /// own. One that has processes stays until they have ended.
    pub(super) fn sweep(&self, is_there: impl Fn(&str) -> bool) {
        // There is none before the first machine with cores.
        let Ok(entries) = fs::read_dir(&self.path) else { return };
        for entry in entries.flatten() {
            let name = entry.file_name();
            let machine = name.to_str().and_then(|name| name.strip_prefix(PREFIX));
            if machine.is_some_and(|machine| !is_there(machine)) {
                let _ = fs::remove_dir(entry.path());
            }
        }
        // Refused as long as there is a group in it.
        let _ = fs::remove_dir(&self.path);
    }

    /// Weight of a machine's group. The weights of all machines add up to at most the kernel's
    /// limit for one group, which keeps their proportions.
    fn weight(&self, cores: u32) -> u64 {
        let weights = self.version.weights();
        let per_core = weights.end() / u64::from(self.cores.max(1));
        let per_core = per_core.clamp(1, self.version.usual_weight());
        (per_core * u64::from(cores)).clamp(*weights.start(), *weights.end())
    }

    /// Weight of the agent's group: the usual weight of a group for each managed core. Machines get
    /// their promised time while no more groups beside this one are busy than the host has
    /// unmanaged cores.
    fn own_weight(&self) -> u64 {
        (self.version.usual_weight() * u64::from(self.cores)).min(*self.version.weights().end())
    }
}

fn has_word(file: &Path, word: &str) -> bool {
    let text = fs::read_to_string(file).unwrap_or_default();
    text.split_whitespace().any(|one| one == word)
}

fn make(group: &Path) -> Result<(), String> {
    match fs::create_dir(group) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            Err(format!("cannot make the cgroup {}: {error}", group.display()))
        }
        _ => Ok(()),
    }
}

fn write(file: &Path, value: impl ToString) -> Result<(), String> {
    let value = value.to_string();
    fs::write(file, &value)
        .map_err(|error| format!("cannot set {} to {value}: {error}", file.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Child, Command};

    struct Sleeps(Child);

    impl Sleeps {
        fn start() -> Sleeps {
            Sleeps(Command::new("sleep").arg("600").spawn().expect("started"))
        }
    }

    impl Drop for Sleeps {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    fn read(path: &Path) -> String {
        fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    }

    /// With the controller that this host has, whichever it is.
    #[test]
    fn machines_are_in_groups_of_the_kernel() {
        let name = format!("hecaton-test-{}", std::process::id());
        let find = |cores| CpuGroups::find(Path::new(CGROUPS), &name, cores);
        let (groups, machine) = match find(3) {
            Ok(groups) => (groups, Sleeps::start()),
            Err(reason) => {
                return println!("skipped: machines_are_in_groups_of_the_kernel: {reason}");
            }
        };
        let pid = machine.0.id();
        let process = ProcessId::of(pid).expect("it runs");
        if let Err(reason) = groups.enter("a.b", 2, process) {
            return println!("skipped: machines_are_in_groups_of_the_kernel: {reason}");
        }
        let (file, usual) = (groups.version.file(), groups.version.usual_weight());
        let group = groups.path().join("vm-a.b");
        assert_eq!(read(&group.join("cgroup.procs")), format!("{pid}\n"));
        assert_eq!(read(&group.join(file)), format!("{}\n", 2 * usual));
        assert_eq!(read(&groups.path().join(file)), format!("{}\n", 3 * usual));
        // The next agent, which finds it, and then another machine of that name.
        let groups = find(2).expect("as before");
        groups.enter("a.b", 1, process).expect("again");
        assert_eq!(read(&group.join(file)), format!("{usual}\n"));
        assert_eq!(read(&groups.path().join(file)), format!("{}\n", 2 * usual));
        groups.sweep(|name| name == "a.b");
        groups.sweep(|_| false);
        assert!(group.exists(), "it has a process still");
        drop(machine);
        assert_eq!(groups.enter("a.b", 1, process), Ok(()), "who has ended is in no group");
        groups.sweep(|name| name == "a.b");
        assert!(group.exists());
        groups.sweep(|_| false);
        assert!(!groups.path().exists(), "nothing is left");
    }

    /// Checks the written files in plain directories, since a real host has the controller in one
    /// version only.
    #[test]
    fn both_versions_are_spoken() {
        let root = tempfile::tempdir().unwrap();
        let cgroups = root.path();
        let process = ProcessId::of(std::process::id()).expect("it runs");
        let of_its_number = serde_json::json!({ "pid": process.pid, "started_ticks": 1 });
        let ended = serde_json::from_value(of_its_number).expect("a process");
        let missing = CpuGroups::find(cgroups, "h", 4).unwrap_err();
        assert!(missing.starts_with("there is no cpu controller under"), "{missing}");
        for mount in [cgroups.join("unified"), cgroups.to_owned()] {
            fs::create_dir_all(mount.join("h/vm-b")).unwrap();
            fs::write(mount.join("cgroup.controllers"), "cpuset cpu memory\n").unwrap();
            for group in [&mount, &mount.join("h")] {
                fs::write(group.join("cgroup.subtree_control"), "memory\n").unwrap();
            }
            let groups = CpuGroups::find(cgroups, "h", 4).unwrap();
            groups.enter("a", 3, process).unwrap();
            groups.enter("c", 1, ended).unwrap();
            assert!(!groups.group_of("c").join("cgroup.procs").exists(), "another one was moved");
            // Its processes are there already.
            let other = groups.group_of("b");
            assert!(groups.are_beside(&other));
            groups.weigh(&other, 1).unwrap();
            assert!(!other.join("cgroup.procs").exists(), "somebody was moved");
            for (file, text) in [
                ("cgroup.subtree_control", "+cpu"),
                ("h/cgroup.subtree_control", "+cpu"),
                ("h/cpu.weight", "400"),
                ("h/vm-a/cpu.weight", "300"),
                ("h/vm-a/cgroup.procs", &process.pid.to_string()),
                ("h/vm-b/cpu.weight", "100"),
            ] {
                assert_eq!(read(&mount.join(file)), text, "{file}");
            }
            assert!(groups.are_beside(&mount.join("hecaton-vm-a")));
            fs::write(mount.join("cgroup.subtree_control"), "").unwrap();
            fs::write(mount.join("cgroup.type"), "domain\n").unwrap();
            fs::write(mount.join("cgroup.procs"), "8\n").unwrap();
            let busy = groups.enter("a", 3, process).unwrap_err();
            assert!(busy.contains("it has processes of its own"), "{busy}");
        }
        // Where both are there, the controller is version 1's.
        fs::create_dir(cgroups.join("cpu")).unwrap();
        fs::write(cgroups.join("cpu/cpu.shares"), "1024\n").unwrap();
        let groups = CpuGroups::find(cgroups, "h", 4).unwrap();
        groups.enter("a", 3, process).unwrap();
        assert_eq!(read(&cgroups.join("cpu/h/cpu.shares")), "4096");
        assert_eq!(read(&cgroups.join("cpu/h/vm-a/cpu.shares")), "3072");
        assert!(!cgroups.join("cpu/cgroup.subtree_control").exists());
        assert!(!groups.are_beside(&cgroups.join("memory/hecaton-vm-a")));
    }

    #[test]
    fn weights_are_in_proportion_on_large_hosts() {
        for version in [Version::V1, Version::V2] {
            let (path, root) = (PathBuf::new(), PathBuf::new());
            let groups =
                |cores| CpuGroups { version, path: path.clone(), root: root.clone(), cores };
            for cores in [1, 2, 100, 256, 500, 4096] {
                let groups = groups(cores);
                let all = groups.weight(cores);
                assert!(version.weights().contains(&all), "{all}");
                assert!(version.weights().contains(&groups.own_weight()));
                let one = groups.weight(1).max(1);
                assert_eq!(groups.weight(cores / 2 + 1), one * u64::from(cores / 2 + 1));
            }
        }
    }
}
