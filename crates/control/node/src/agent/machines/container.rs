//! A container: all processes of a memory cgroup, whoever has started them.
//!
//! The group is the agent's: it makes it, moves the launcher into it before that becomes the
//! container's program, and removes it when the last process has ended. A launcher that entered by
//! itself would have to be root's.

use crate::agent::cores::Cores;
use crate::agent::host_memory::Held;
use crate::agent::machines::process::ProcessId;
use crate::causes::with_causes;
use hecaton_memory::cgroup::{CgroupError, Charged, Group, Hierarchy};
use rustix::fs::{Access, access};
use std::fs;
use std::path::{Path, PathBuf};

/// Prefix of the groups' names.
const PREFIX: &str = "hecaton-vm-";

/// A container that was admitted.
#[derive(Debug)]
pub(crate) struct Container {
    group: Group,
    /// As of this look.
    charged: Charged,
}

impl Container {
    /// The directory that the group of a new one is to have; the reason if there can be none.
    /// `cores`: those of the host, if it has some of them; where memory and cpu have one hierarchy,
    /// it has one group for both.
    pub(crate) fn place(name: &str, cores: Option<&Cores>) -> Result<PathBuf, String> {
        let hierarchy = Hierarchy::find().map_err(|error| with_causes(&error))?;
        let alone = hierarchy.path_of(format!("{PREFIX}{name}"));
        let path = match cores.and_then(|cores| cores.group_instead(name, &alone)) {
            Some(path) => {
                // The agent's own, and perhaps that of a machine that has just ended.
                let _ = fs::remove_dir(&path);
                path
            }
            None => alone,
        };
        if path.exists() {
            return Err(format!(
                "the memory cgroup {} is there already, and no machine's of this agent; remove it (rmdir) if it has no \
                 processes, or choose another name",
                path.display()
            ));
        }
        let root = hierarchy.root();
        access(root, Access::WRITE_OK).map_err(|error| {
            format!(
                "the node cannot make memory cgroups in {}: {error}; run it as root",
                root.display()
            )
        })?;
        Ok(path)
    }

    /// The one whose group has this directory: as it is, or made now. `base_bytes`: what it has
    /// from its start.
    pub(crate) fn open(path: &Path, base_bytes: u64) -> Result<Container, String> {
        let opened = || {
            let group = match Group::at(path) {
                Some(group) => group,
                None => Hierarchy::find()?.make(path, base_bytes)?,
            };
            // An agent before this one may have been killed as it made it.
            if group.members()?.is_empty() {
                group.raise(base_bytes)?;
            }
            Ok(Container { group, charged: Charged::default() })
        };
        opened().map_err(|error: CgroupError| with_causes(&error))
    }

    /// Moves its launcher into the group.
    pub(crate) fn take_in(&self, launcher: ProcessId) -> Result<(), String> {
        if !launcher.is_alive() {
            return Err("its launcher has ended".to_owned());
        }
        self.group.enter(launcher.pid).map_err(|error| with_causes(&error))
    }

    pub(crate) fn group(&self) -> &Group {
        &self.group
    }

    /// Whether it has processes; also if that cannot be told.
    pub(crate) fn runs(&self) -> bool {
        runs(&self.group)
    }

    pub(crate) fn look(&mut self) {
        // A removed group has no charges.
        self.charged = self.group.charged().unwrap_or_default();
    }

    pub(crate) fn charged(&self) -> Charged {
        self.charged
    }

    /// The memory charged against its limit: up to `base_bytes` as the minimum, the rest above it.
    pub(crate) fn held(&self, base_bytes: u64) -> Held {
        let more_bytes = self.charged.all_bytes.saturating_sub(base_bytes);
        Held { base_bytes: self.charged.all_bytes - more_bytes, more_bytes }
    }

    pub(crate) fn kill(&self) {
        if let Err(error) = self.group.kill() {
            let (group, error) = (self.group.path().display(), with_causes(&error));
            tracing::warn!(%group, error, "a container cannot be killed");
        }
    }
}

fn runs(group: &Group) -> bool {
    group.members().map_or(true, |members| !members.is_empty())
}

/// Whether there is a group with processes.
pub(crate) fn runs_at(path: &Path) -> bool {
    Group::at(path).is_some_and(|group| runs(&group))
}

/// Removes a group that has no processes any more.
pub(crate) fn remove(path: &Path) {
    let removed = Group::at(path).map_or(Ok(()), |group| group.remove());
    if let Err(error) = removed {
        tracing::warn!(group = %path.display(), %error, "a container's cgroup cannot be removed");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_it_has_is_its_minimum_first() {
        let dir = tempfile::tempdir().unwrap();
        for (file, text) in [
            ("memory.max", "max\n"),
            ("memory.high", "max\n"),
            ("memory.current", "5000\n"),
            ("memory.stat", "anon 3000\nshmem 100\n"),
            ("cgroup.procs", ""),
        ] {
            std::fs::write(dir.path().join(file), text).unwrap();
        }
        let mut container = Container::open(dir.path(), 4096).expect("it is there");
        let limit = std::fs::read_to_string(dir.path().join("memory.max")).unwrap();
        assert_eq!(limit, "4096", "nobody was in it yet");
        container.look();
        let held = |base_bytes| {
            let held = container.held(base_bytes);
            (held.base_bytes, held.more_bytes)
        };
        assert_eq!((held(4096), held(8192)), ((4096, 904), (5000, 0)));
        assert_eq!(container.charged().in_use_bytes, 3100);
        assert!(!container.runs() && !runs_at(dir.path()));
        std::fs::write(dir.path().join("cgroup.procs"), "1\n").unwrap();
        assert!(container.runs() && runs_at(dir.path()));
        std::fs::write(dir.path().join("memory.max"), "9000\n").unwrap();
        Container::open(dir.path(), 4096).expect("it is there");
        let limit = std::fs::read_to_string(dir.path().join("memory.max")).unwrap();
        assert_eq!(limit, "9000\n", "as it was found");
    }
}
