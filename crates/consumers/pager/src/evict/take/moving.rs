//! Takes pages where the kernel can move them (Linux 6.8): the helper moves them into its area.
//!
//! The kernel refuses to move a page that a device or the kernel itself has pinned (O_DIRECT, AIO,
//! registered buffers of io_uring, RDMA), because the device goes on reading or writing it past the
//! page table. Such a page stays local: if the pager dropped it, data that arrives would be lost.
//!
//! | the kernel refuses a page | then |
//! |---|---|
//! | behind another refused page of its run | it is moved alone |
//! | that a fork shares, or shared once | the process gets a page of its own, which is moved |
//! | that is pinned, or locked (`mlock`) | it stays |
//! | in memory that is not writable | it is left to [`super::dropping`] |

use super::{Victim, runs_of};
use crate::core::BatchItem;
use crate::evict::Evictor;
use crate::programs::helper::{self, Helper, Line};
use crate::programs::mappings::MappingQuery;
use crate::programs::remote;
use crate::state::entry::Place;
use hecaton_memory::PAGE_SIZE;
use hecaton_uffd::handover::{Command, HELD, NEVER_HELD, Op, Range};

const PAGE: u64 = PAGE_SIZE as u64;

/// How many pages are moved at a time.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Runs {
    /// Neighbours together.
    Long,
    /// Each alone, so that one that is refused stops no other.
    Single,
}

impl Evictor {
    /// Moves the pages of a group away and copies them. Those that are neither taken nor passed
    /// over afterwards are for [`super::dropping`]. False if the program has ended.
    pub(super) fn move_away(
        &mut self,
        first: usize,
        group: &mut [Victim],
        helper: &Helper,
        line: Line,
        pid: i32,
    ) -> bool {
        if !self.move_once(first, group, helper.area, line, pid, Runs::Long) {
            return false;
        }
        if !group.iter().any(Victim::is_movable) {
            return true;
        }
        if !self.unshare(first, group, line, pid) {
            return false;
        }
        if !group.iter().any(Victim::is_movable) {
            // Libc goes on when the helper is asked something: if nothing is to be dropped, this.
            self.last_nonce += 1;
            return group.iter().any(Victim::is_left)
                || line.ask(Op::Barrier, &[], self.last_nonce).is_ok();
        }
        // From here on the area's places are those of the pages that are asked for now.
        if helper::send(helper.socket, &Command::new(Op::Clear, 0)).is_err() {
            return false;
        }
        let core = self.shared.lock();
        for (i, _) in group.iter().enumerate().filter(|(_, victim)| !victim.is_movable()) {
            core.state.batch.leave_out(first + i);
        }
        drop(core);
        let moved = self.move_once(first, group, helper.area, line, pid, Runs::Single);
        self.refuse(group, Victim::is_movable);
        moved
    }

    /// The helper moves what is at an address, whatever that is. A thread that moves memory about
    /// (`mremap`) waits until the pager has read of it, and no other can put pages in the place of
    /// the first before that (`libhecaton.so` lets libc's calls take turns). So from here, where
    /// the addresses are made sure of, until the helper has answered nothing is read: a page that
    /// was moved meanwhile has left a hole, and is not taken.
    fn move_once(
        &mut self,
        first: usize,
        group: &mut [Victim],
        area: u64,
        line: Line,
        pid: i32,
        kind: Runs,
    ) -> bool {
        let mut core = self.shared.lock();
        for (i, victim) in group.iter_mut().enumerate().filter(|(_, victim)| victim.is_movable()) {
            let BatchItem { key, now_at } = core.batch[first + i];
            if key != now_at {
                let old = core.get(key);
                core.set(key, old.with_busy(false));
                core.batch[first + i].key = now_at;
                victim.key = now_at;
            }
            if core.get(now_at).place() != Place::Resident {
                // Freed meanwhile, and there may be another page at its address.
                victim.passed_over = true;
                core.state.batch.leave_out(first + i);
            }
        }
        core.taking = Some(group[0].key.space());
        drop(core);
        let asked: Vec<usize> = (0..group.len()).filter(|&i| group[i].is_movable()).collect();
        let runs = match kind {
            Runs::Long => runs_of(group, Victim::is_movable),
            Runs::Single => {
                let run = |&i: &usize| Range { start: group[i].key.address(), len: PAGE };
                asked.iter().map(run).collect()
            }
        };
        self.last_nonce += 1;
        let answer = line.ask(Op::Take, &runs, self.last_nonce);
        self.shared.lock().taking = None;
        self.shared.taken.notify_all();
        let Ok(done) = answer else { return false };

        // Where in the area each page is: the pages asked for are there in their order.
        let mut place = vec![None; group.len()];
        let mut at = 0;
        for (run, moved) in runs.iter().zip(done) {
            let pages = (run.len / PAGE) as usize;
            for step in 0..pages.min(moved as usize) {
                let i = asked[at + step];
                place[i] = Some(area + (at + step) as u64 * PAGE);
                group[i].taken = true;
            }
            at += pages;
        }
        let address = |i: usize| place[i].unwrap_or_default();
        self.copy(pid, first, group, address, |i, _| place[i].is_some());
        true
    }

    /// Gives the process pages of its own in the place of those that a fork shares, where they can
    /// be moved then. False if the program has ended.
    ///
    /// The evictor reads each page. If another page came to the address, and that page is in the
    /// pool, the evictor would wait for itself. So libc changes no mappings until the pager sends
    /// the helper the next command. A program without glibc can change them; the pager ends it if
    /// the evictor meets such a page (see [`crate::evict::own_reads`]).
    fn unshare(&mut self, first: usize, group: &mut [Victim], line: Line, pid: i32) -> bool {
        if self.hold(first, group, line, &[HELD, NEVER_HELD]).is_err() {
            return false;
        }
        let mut query = MappingQuery::new(pid);
        let mut addresses = Vec::new();
        for victim in group.iter_mut().filter(|victim| victim.is_movable()) {
            let key = victim.key;
            let writable = query.is_writable(key.address());
            let mut core = self.shared.lock();
            let mapped = core.space(key.space()).map(|space| space.mapped(key.vpn(), 1));
            if !matches!(mapped, Some(Ok(pages)) if pages[0].present) {
                // A read of it would wait for ourselves.
                victim.passed_over = true;
            } else if writable == Some(true) {
                addresses.push(key.address());
                core.own_reads.begin([key]);
            } else {
                victim.immovable = true;
            }
        }
        remote::unshare(pid, &addresses);
        self.shared.lock().own_reads.end();
        true
    }
}
