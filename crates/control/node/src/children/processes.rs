//! Reads memory, CPU time and threads of the node's processes from `/proc`.
//!
//! The node reports for itself and its children, which serve no metrics of their own. Each would
//! need a port that is found, secured and known to the collector. The port would vanish with the
//! process just when it matters. The children's counts reach the node each second anyway.

use serde::{Deserialize, Serialize};
use std::fs;

/// Fields of `/proc/PID/stat`, counted from the one after the name.
mod field {
    pub(crate) const USER_TICKS: usize = 11;
    pub(crate) const SYSTEM_TICKS: usize = 12;
    pub(crate) const THREADS: usize = 17;
    pub(crate) const RESIDENT_PAGES: usize = 21;
}

/// The purpose of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// The node itself.
    Node,
    /// It lends memory.
    Donor,
    /// It pages a program or a machine.
    Pager,
    /// It serves a volume.
    Volume,
}

impl Role {
    /// The role in one word.
    pub fn name(self) -> &'static str {
        match self {
            Role::Node => "node",
            Role::Donor => "donor",
            Role::Pager => "pager",
            Role::Volume => "volume",
        }
    }
}

/// A process of a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessReport {
    /// The purpose of the process.
    pub role: Role,
    /// The name of the node, donor, consumer or volume.
    pub name: String,
    /// The resources that it uses.
    #[serde(flatten)]
    pub takes: ProcessUse,
}

/// The resources that a process uses at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessUse {
    /// Resident memory, including memory shared with others, such as what a donor has lent.
    pub resident_bytes: u64,
    /// Time that its threads have run, in milliseconds.
    pub cpu_ms: u64,
    /// Number of threads.
    pub threads: u64,
}

impl ProcessUse {
    /// Reads the use of the process with this number; none if it has ended.
    pub fn of(pid: u32) -> Option<ProcessUse> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        parse(&stat, rustix::param::clock_ticks_per_second(), rustix::param::page_size() as u64)
    }
}

fn parse(stat: &str, ticks_per_s: u64, page_bytes: u64) -> Option<ProcessUse> {
    // The name, in parentheses, may contain anything.
    let fields: Vec<&str> = stat.rsplit(") ").next()?.split_whitespace().collect();
    let number = |field: usize| fields.get(field)?.parse::<u64>().ok();
    let ticks = number(field::USER_TICKS)? + number(field::SYSTEM_TICKS)?;
    Some(ProcessUse {
        resident_bytes: number(field::RESIDENT_PAGES)? * page_bytes,
        cpu_ms: ticks * 1000 / ticks_per_s.max(1),
        threads: number(field::THREADS)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fields_are_the_kernels() {
        let stat = "42 (a) b) S 1 42 42 0 -1 4194560 100 0 0 0 70 30 0 0 20 0 5 0 1234 10000000 256 \
                    18446744073709551615 1 1";
        let takes = ProcessUse { resident_bytes: 1 << 20, cpu_ms: 1000, threads: 5 };
        assert_eq!(parse(stat, 100, 4096), Some(takes));
        assert_eq!(parse("42 (a) S 1", 100, 4096), None);
    }

    #[test]
    fn this_process_takes_something_and_none_nothing() {
        let takes = ProcessUse::of(std::process::id()).expect("it runs");
        assert!(takes.resident_bytes > 0 && takes.threads > 0, "{takes:?}");
        assert_eq!(ProcessUse::of(u32::MAX), None);
    }
}
