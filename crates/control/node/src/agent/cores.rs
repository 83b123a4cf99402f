//! The host's cores that machines have: how many there are, and whether the kernel keeps to what
//! was promised.

use super::AgentError;
use super::cpu_groups::{CGROUPS, CpuGroups};
use super::report::CoreReport;
use crate::agent::machines::machine::Machine;
use hecaton_broker::{CoreLedger, VmId};
use rustix::thread::sched_getaffinity;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

/// The kernel's counters, with a line for each processor that is online.
const STAT: &str = "/proc/stat";

/// The cores of this host, as they were when the agent began.
#[derive(Debug)]
pub(super) struct Cores {
    /// Processors that are online.
    host: u32,
    /// Processors that all machines together may have, from 1 to `host`.
    managed: u32,
    /// The error says why the host has no usable cpu controller.
    groups: Result<CpuGroups, String>,
}

/// Whether a machine's process is in its cpu cgroup.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum CpuPlace {
    /// Nobody has tried.
    #[default]
    Unplaced,
    /// It is.
    Placed,
    /// It is not, for this reason.
    Failed(String),
}

impl Cores {
    /// `manage`: how many machines may have, if somebody has said; otherwise, as many as this node
    /// may run on. `directory`: the machines', which no other agent has.
    pub(super) fn new(manage: Option<u32>, directory: &Path) -> Result<Cores, AgentError> {
        let ours = sched_getaffinity(None).map_err(std::io::Error::from)?.count();
        let host = online(&fs::read_to_string(STAT)?).max(ours);
        if let Some(manage) = manage.filter(|manage| !(1..=host).contains(manage)) {
            return Err(AgentError::ManageCores { manage, host });
        }
        let managed = manage.unwrap_or(ours);
        // The same as long as its machines live, and no other agent's.
        let directory = fs::metadata(directory)?;
        let name = format!("hecaton-{:x}-{:x}", directory.dev(), directory.ino());
        let groups = CpuGroups::find(Path::new(CGROUPS), &name, managed);
        Ok(Cores { host, managed, groups })
    }

    /// How many machines may have.
    pub(super) fn managed(&self) -> u32 {
        self.managed
    }

    /// The group that has a machine's processes for its cores, if they cannot be in `group` as
    /// well: version 2 has one hierarchy for all.
    pub(super) fn group_instead(&self, machine: &str, group: &Path) -> Option<PathBuf> {
        let groups = self.groups.as_ref().ok().filter(|groups| groups.are_beside(group))?;
        Some(groups.group_of(machine))
    }

    /// Has each machine's process in its group, tries again where that has failed, and removes the
    /// groups of those that have ended.
    pub(super) fn keep(&self, machines: &mut BTreeMap<VmId, Machine>) {
        let mut there = BTreeSet::new();
        for machine in machines.values_mut().filter(|machine| machine.record.cores > 0) {
            let (name, cores) = (machine.record.name.as_str(), machine.record.cores);
            there.insert(name);
            if machine.cpu_place == CpuPlace::Placed {
                continue;
            }
            let entered = self.groups.as_ref().map_err(String::clone);
            let entered = entered.and_then(|groups| {
                let its = machine.record.cgroup.as_deref();
                match its.filter(|group| groups.are_beside(group)) {
                    Some(group) => groups.weigh(group, cores),
                    None => groups.enter(name, cores, machine.record.process),
                }
            });
            machine.cpu_place = match entered {
                Ok(()) => CpuPlace::Placed,
                Err(reason) => {
                    if machine.cpu_place == CpuPlace::Unplaced {
                        tracing::warn!(
                            vm = name,
                            cores,
                            reason,
                            "nothing but its admission keeps others from its cores"
                        );
                    }
                    CpuPlace::Failed(reason)
                }
            };
        }
        if let Ok(groups) = &self.groups {
            groups.sweep(|name| there.contains(name));
        }
    }

    pub(super) fn report(&self, ledger: CoreLedger) -> CoreReport {
        CoreReport {
            host: u64::from(self.host),
            unmanaged: u64::from(self.host.saturating_sub(self.managed)),
            ledger,
            group: self.groups.as_ref().ok().map(|groups| groups.path().to_owned()),
        }
    }
}

/// How many processors have a line of their own: `cpu0` and so on.
fn online(stat: &str) -> u32 {
    let is_one = |line: &&str| {
        let number = line.strip_prefix("cpu");
        number.is_some_and(|number| number.starts_with(|first: char| first.is_ascii_digit()))
    };
    u32::try_from(stat.lines().filter(is_one).count()).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors_are_counted() {
        let stat = "cpu  1 2 3\ncpu0 1 2\ncpu1 0 0\ncpu12 0 0\nintr 5\nctxt 7\n";
        assert_eq!(online(stat), 3);
        let directory = tempfile::tempdir().unwrap();
        let all = Cores::new(None, directory.path()).expect("this host has some");
        assert!((1..=all.host).contains(&all.managed()));
        let most = Cores::new(Some(all.host), directory.path()).expect("as many as there are");
        assert_eq!(most.report(CoreLedger::default()).unmanaged, 0);
        for manage in [0, all.host + 1] {
            let error = Cores::new(Some(manage), directory.path()).unwrap_err().to_string();
            assert!(error.contains(&format!("--manage-cores {manage} ")), "{error}");
        }
    }
}
