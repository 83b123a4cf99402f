//! Drops pages of shared memory from the page tables of programs, so that the keeper of another
//! pager can evict them.
//!
//! The helper of each program drops them (`MADV_DONTNEED`). In a private mapping that would destroy
//! the contents. So libc changes no mappings from before the pager reads which they are until the
//! helper is done. Where that cannot be, the pages stay mapped, and with that in local memory.

use crate::core::Core;
use crate::evict::Evictor;
use crate::programs::helper;
use crate::programs::mappings::{SharedMapping, shared_mappings};
use hecaton_uffd::files::{FileRun, Unmap};
use hecaton_uffd::handover::{HELD, MAX_RUNS, Op, Range};
use std::os::fd::{OwnedFd, RawFd};

/// Runs of a file that are dropped at a time: few enough for the mappings of each to be as many.
const RUNS_AT_A_TIME: usize = MAX_RUNS / 4;

impl Evictor {
    /// Executes the orders that wait.
    pub(super) fn unmap_files(&mut self) {
        while let Some((order, _connection)) = self.next_unmap() {
            let programs: Vec<(RawFd, i32)> = programs(&self.shared.lock());
            for (socket, pid) in programs {
                let mappings = shared_mappings(pid, order.device).unwrap_or_default();
                let parts = order.runs().chunks(RUNS_AT_A_TIME);
                for runs in parts.filter(|runs| !mapped(&mappings, runs).is_empty()) {
                    self.unmap(socket, pid, order.device, runs);
                }
            }
        }
    }

    fn next_unmap(&self) -> Option<(Unmap, OwnedFd)> {
        self.shared.lock().unmaps.pop()
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
