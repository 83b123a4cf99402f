//! The host's memory: what there is, what programs that are not the agent's have of it, and what is
//! really in memory of a machine's files.

use hecaton_memory::meminfo::{MEMINFO, field_bytes};
use hecaton_memory::numa::{self, SYSFS_NODES};
use hecaton_vm::create::Memory;
use std::collections::VecDeque;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::time::Duration;

/// How long the most that other programs had counts: what comes and goes within seconds should not
/// have machines grow and shrink with it.
const WINDOW: Duration = Duration::from_secs(30);

/// Rounds up the use of other programs, so that machines do not resize with each small change.
const STEP_BYTES: u64 = 64 << 20;

/// One part in so many of a node is left to other programs beyond what they have: it is gone before
/// the next look when they take more.
const SLACK: u64 = 64;

/// A NUMA node of the host, at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NodeMemory {
    /// The kernel's number for it.
    pub(super) node: u32,
    pub(super) total_bytes: u64,
    /// Estimate of the memory that programs can still allocate.
    pub(super) available_bytes: u64,
}

/// The nodes that have memory; a host without NUMA has one.
pub(super) fn read() -> io::Result<Vec<NodeMemory>> {
    read_from(Path::new(SYSFS_NODES), Path::new(MEMINFO))
}

fn read_from(sysfs: &Path, meminfo: &Path) -> io::Result<Vec<NodeMemory>> {
    let nodes = numa::nodes(sysfs)?;
    if nodes.len() < 2 {
        // The kernel's own estimate is better than what a node's figures tell.
        let text = fs::read_to_string(meminfo)?;
        return Ok(vec![NodeMemory {
            node: nodes.first().map_or(0, |node| node.node),
            total_bytes: field(&text, "MemTotal")?,
            available_bytes: field(&text, "MemAvailable")?,
        }]);
    }
    let one = |node: u32| {
        let text = fs::read_to_string(sysfs.join(format!("node{node}/meminfo")))?;
        let text = text.replace(&format!("Node {node} "), "");
        let mut available_bytes = field(&text, "MemFree")?;
        for reclaimable in ["Active(file)", "Inactive(file)", "SReclaimable"] {
            available_bytes += field(&text, reclaimable)?;
        }
        Ok(NodeMemory { node, total_bytes: field(&text, "MemTotal")?, available_bytes })
    };
    nodes.iter().map(|node| one(node.node)).collect()
}

fn field(text: &str, name: &str) -> io::Result<u64> {
    let missing = || io::Error::other(format!("the kernel does not say {name} of a node's memory"));
    field_bytes(text, name).ok_or_else(missing)
}

/// Each node's part of what the agent manages; the rest is left to other programs.
pub(super) fn managed(totals: &[u64], manage_bytes: Option<u64>) -> Vec<u64> {
    let Some(manage) = manage_bytes else { return totals.to_vec() };
    let all: u64 = totals.iter().sum();
    let part =
        |total: u64| (u128::from(manage) * u128::from(total) / u128::from(all.max(1))) as u64;
    totals.iter().map(|total| part(*total).min(*total)).collect()
}

/// Use of one NUMA node by other programs: the recent maximum, rounded up, and slack.
#[derive(Debug, Default)]
pub(super) struct OtherUse {
    seen: VecDeque<(Duration, u64)>,
}

impl OtherUse {
    /// Notes the bytes in use on a node that are not the agent's. Returns the bytes that count from
    /// now on: the maximum within `WINDOW`, rounded up to `STEP_BYTES`, plus 1/`SLACK` of the node.
    pub(super) fn note(&mut self, total_bytes: u64, bytes: u64, now: Duration) -> u64 {
        // A falling sequence: the first is the most.
        while self.seen.back().is_some_and(|(_, earlier)| *earlier <= bytes) {
            self.seen.pop_back();
        }
        self.seen.push_back((now, bytes));
        while self.seen.front().is_some_and(|(at, _)| *at + WINDOW < now) {
            self.seen.pop_front();
        }
        let most = self.seen.front().map_or(bytes, |(_, bytes)| *bytes);
        most.next_multiple_of(STEP_BYTES).saturating_add(total_bytes / SLACK).min(total_bytes)
    }
}

/// The memory files of QEMU with this number: how large each is, and what of it is in memory. None
/// if it cannot be looked at, because it is ending or is another user's.
pub(super) fn memory_files(pid: u32) -> Option<Vec<MemoryFile>> {
    let mut files: Vec<(u64, MemoryFile)> = Vec::new();
    for entry in fs::read_dir(format!("/proc/{pid}/fd")).ok()?.flatten() {
        let path = entry.path();
        let is_memory = fs::read_link(&path)
            .is_ok_and(|target| target.to_string_lossy().starts_with("/memfd:memory-backend"));
        if !is_memory {
            continue;
        }
        let Ok(file) = fs::metadata(&path) else { continue };
        if files.iter().all(|(inode, _)| *inode != file.ino()) {
            let found = MemoryFile { bytes: file.len(), held_bytes: file.blocks() * 512 };
            files.push((file.ino(), found));
        }
    }
    Some(files.into_iter().map(|(_, file)| file).collect())
}

/// Resident bytes of a process that no file on disk backs: anonymous memory, shared memory and huge
/// pages. `None` if the process has ended.
pub(super) fn resident_bytes(pid: u32) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let parts = ["RssAnon", "RssShmem", "HugetlbPages"];
    Some(parts.iter().filter_map(|name| field_bytes(&status, name)).sum())
}

/// The memory of a machine that is no file's of its own: in proportion to what its parts have.
pub(super) fn spread_over_parts(memory: &Memory, held_bytes: u64) -> Vec<MemoryFile> {
    let base_bytes = memory.base_bytes().max(1);
    let part = |bytes: u64| {
        let held = u128::from(held_bytes.min(base_bytes)) * u128::from(bytes);
        MemoryFile { bytes, held_bytes: (held / u128::from(base_bytes)) as u64 }
    };
    memory.parts.iter().map(|one| part(one.base_bytes)).collect()
}

/// A machine's memory file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MemoryFile {
    pub(super) bytes: u64,
    /// In memory.
    pub(super) held_bytes: u64,
}

/// Resident memory of one part of a machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Held {
    /// Resident bytes of the minimum, which the machine has as long as it runs.
    pub(super) base_bytes: u64,
    /// Resident bytes above the minimum.
    pub(super) more_bytes: u64,
}

/// Resident memory of each part. A part's file is found by its size, and belongs to one part only.
/// Among files of equal size the earlier part has the earlier file, since QEMU makes them in the
/// order of its command line.
pub(super) fn held_by_part(memory: &Memory, files: &[MemoryFile]) -> Vec<Held> {
    let mut files = files.to_vec();
    let mut take = |bytes: u64| {
        let at = files.iter().position(|file| bytes > 0 && file.bytes == bytes);
        at.map_or(0, |at| files.remove(at).held_bytes)
    };
    let parts = memory.parts.iter();
    parts
        .map(|part| {
            let [base_bytes, more_bytes] = memory.files(part).map(&mut take);
            if !memory.is_ballooned {
                return Held { base_bytes, more_bytes };
            }
            let held_bytes = base_bytes;
            let base_bytes = held_bytes.min(part.base_bytes);
            Held { base_bytes, more_bytes: held_bytes - base_bytes }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use hecaton_vm::create::Part;

    const M: u64 = 1 << 20;

    #[test]
    fn a_file_is_one_part_s_only() {
        let part = |base_bytes, more_bytes| Part { host_node: None, base_bytes, more_bytes };
        let file = |bytes, held_bytes| MemoryFile { bytes, held_bytes };
        let held = |base_bytes, more_bytes| Held { base_bytes, more_bytes };
        let parts = vec![part(4 * M, 3 * M), part(4 * M, 0), part(4 * M, 2 * M)];
        let memory = Memory { parts, is_ballooned: false };
        let files = [file(4 * M, 1), file(3 * M, 2), file(4 * M, 3), file(0, 4)];
        assert_eq!(held_by_part(&memory, &files), [held(1, 2), held(3, 0), held(0, 0)]);
    }

    #[test]
    fn what_a_balloon_has_not_taken_is_beyond_the_minimum() {
        let memory = Memory::with_balloon(None, 2 * M, 8 * M);
        let held = |held_bytes| {
            let held = held_by_part(&memory, &[MemoryFile { bytes: 8 * M, held_bytes }]);
            (held[0].base_bytes, held[0].more_bytes)
        };
        assert_eq!(held(5 * M), (2 * M, 3 * M));
        assert_eq!(held(M), (M, 0), "less than its minimum");
    }

    #[test]
    fn what_is_no_file_s_is_spread_over_the_parts() {
        let part = |node, base_bytes| Part { host_node: Some(node), base_bytes, more_bytes: 0 };
        let memory = Memory { parts: vec![part(0, 2 * M), part(1, 6 * M)], is_ballooned: false };
        let held = |bytes| {
            let held = held_by_part(&memory, &spread_over_parts(&memory, bytes));
            held.iter().map(|one| one.base_bytes).collect::<Vec<_>>()
        };
        assert_eq!(held(4 * M), [M, 3 * M]);
        assert_eq!(held(99 * M), [2 * M, 6 * M], "QEMU's own is not the machine's");
        assert!(resident_bytes(std::process::id()).expect("this process") > 0);
        assert_eq!(resident_bytes(u32::MAX), None);
    }

    #[test]
    fn this_host_has_memory() {
        let nodes = read().expect("read");
        assert!(nodes.iter().all(|node| node.available_bytes <= node.total_bytes), "{nodes:?}");
        assert!(nodes.iter().map(|node| node.total_bytes).sum::<u64>() > 0);
    }

    #[test]
    fn a_host_of_two_nodes_is_read_node_by_node() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("has_memory"), "0,2\n").unwrap();
        for node in [0, 2] {
            fs::create_dir(dir.path().join(format!("node{node}"))).unwrap();
            let lines = [("MemTotal", 100), ("MemFree", 10 + node), ("Active(file)", 3)];
            let rest = [("Inactive(file)", 4), ("SReclaimable", 5)];
            let text: String = lines
                .iter()
                .chain(&rest)
                .map(|(name, kib)| format!("Node {node} {name}:   {kib} kB\n"))
                .collect();
            fs::write(dir.path().join(format!("node{node}/meminfo")), text).unwrap();
        }
        let nodes = read_from(dir.path(), Path::new("/nowhere")).expect("read");
        let expected = |node: u32, available: u64| NodeMemory {
            node,
            total_bytes: 100 << 10,
            available_bytes: available << 10,
        };
        assert_eq!(nodes, [expected(0, 22), expected(2, 24)]);
    }

    #[test]
    fn nodes_are_managed_in_proportion() {
        assert_eq!(managed(&[30, 10], None), [30, 10]);
        assert_eq!(managed(&[30, 10], Some(20)), [15, 5]);
        assert_eq!(managed(&[30, 10], Some(99)), [30, 10], "no more than there is");
    }

    #[test]
    fn what_comes_and_goes_counts_for_a_while() {
        let mut other = OtherUse::default();
        let mut note = |bytes, second| other.note(6400 * M, bytes, Duration::from_secs(second));
        assert_eq!(note(100 * M, 0), 228 * M);
        assert_eq!(note(1000 * M, 10), 1124 * M, "at once");
        assert_eq!(note(100 * M, 20), 1124 * M);
        assert_eq!(note(200 * M, 40), 1124 * M);
        assert_eq!(note(100 * M, 41), 356 * M, "what was seen since");
        assert_eq!(note(9999 * M, 42), 6400 * M, "no more than there is");
    }
}
