//! Drops pages of files from the page tables of programs, so that the keeper can drop them from the
//! page cache.
//!
//! The helper of each program does it (`MADV_DONTNEED`). In a private mapping that would destroy the
//! contents. So libc changes no mappings from before the pager reads which they are until the helper
//! is done. Where that cannot be, the pages stay mapped, and with that in local memory.

use super::keeping::send;
use crate::core::Core;
use crate::evict::Evictor;
use crate::programs::helper;
use crate::programs::mappings::{SharedMapping, shared_mappings};
use hecaton_shared::line::{FileRun, Order};
use hecaton_uffd::handover::{HELD, MAX_RUNS, Op, Range};
use std::os::fd::RawFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};

/// Runs of a file that are dropped at a time: few enough for the mappings of each to be as many.
const RUNS_AT_A_TIME: usize = MAX_RUNS / 4;

/// An order of a keeper.
#[derive(Debug)]
pub(crate) struct Unmap {
    pub(super) number: u64,
    /// Major and minor number of the files' device.
    pub(super) device: [u32; 2],
    pub(super) runs: Vec<FileRun>,
    /// Where it is told that this is done.
    pub(super) line: Arc<Mutex<UnixStream>>,
}

impl Core {
    /// Whether pages of files are to be unmapped.
    pub(crate) fn wants_unmapping(&self) -> bool {
        !self.files.unmaps.is_empty()
    }
}

impl Evictor {
    /// Executes the orders that wait.
    pub(crate) fn unmap_files(&mut self) {
        while let Some(order) = self.next_unmap() {
            let programs: Vec<(RawFd, i32)> = programs(&self.shared.lock());
            for (socket, pid) in programs {
                let mappings = shared_mappings(pid, order.device).unwrap_or_default();
                let parts = order.runs.chunks(RUNS_AT_A_TIME);
                for runs in parts.filter(|runs| !mapped(&mappings, runs).is_empty()) {
                    self.unmap(socket, pid, order.device, runs);
                }
            }
            // An error: the keeper is gone.
            let _ = send(&order.line, &Order::Unmapped(order.number));
        }
    }

    fn next_unmap(&self) -> Option<Unmap> {
        self.shared.lock().files.unmaps.pop_front()
    }

    fn unmap(&mut self, socket: RawFd, pid: i32, device: [u32; 2], runs: &[FileRun]) {
        self.last_nonce += 1;
        let held = helper::ask(socket, Op::Hold, &[Range::default()], self.last_nonce);
        let ranges = match held.as_deref() {
            Ok([HELD]) => mapped(&shared_mappings(pid, device).unwrap_or_default(), runs),
            Ok(_) => Vec::new(),
            Err(_) => return,
        };
        // Also if there is nothing to drop: libc goes on after this.
        self.last_nonce += 1;
        // An error: the program has ended.
        let _ = helper::ask(socket, Op::Drop, &ranges, self.last_nonce);
    }
}

/// Helper and process of each program.
fn programs(core: &Core) -> Vec<(RawFd, i32)> {
    let program = |index: usize| {
        let pid = core.spaces[index].as_ref()?.pid?;
        Some((core.helper(index)?.socket, pid))
    };
    core.live_spaces().filter_map(|(index, _)| program(index)).collect()
}

/// Where these runs are mapped: at most [`MAX_RUNS`] ranges.
fn mapped(mappings: &[SharedMapping], runs: &[FileRun]) -> Vec<Range> {
    let of_run = |run| mappings.iter().filter_map(move |mapping| mapping.addresses_of(run));
    runs.iter().flat_map(of_run).take(MAX_RUNS).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_mapped_part_of_a_run_is_dropped() {
        let mapping = |start: u64, node: u64, offset: u64| SharedMapping {
            range: Range { start, len: 0x4000 },
            node,
            offset,
        };
        let mappings =
            [mapping(0x10000, 7, 0), mapping(0x20000, 7, 0x3000), mapping(0x30000, 8, 0)];
        let run = FileRun { node: 7, offset: 0x2000, bytes: 0x4000 };
        let ranges = mapped(&mappings, &[run]);
        let range = |start, len| Range { start, len };
        assert_eq!(ranges, [range(0x12000, 0x2000), range(0x20000, 0x3000)]);
        let run = FileRun { node: 7, offset: 0x7000, bytes: 0x1000 };
        assert_eq!(mapped(&mappings, &[run]), []);
    }
}
