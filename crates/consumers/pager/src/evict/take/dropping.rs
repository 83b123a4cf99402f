//! Takes pages where the kernel cannot move them: protect, copy, drop.
//!
//! The kernel moves no memory before Linux 6.8, and only writable memory since then.
//!
//! The kernel drops a pinned page without an error, and the device goes on with a page that no
//! process sees. So a page that only this process maps (a pinned one is never shared)
//! stays if anything in the process is pinned for long (`VmPin` of `/proc/PID/status`: registered
//! buffers of io_uring, RDMA).

use super::{Victim, runs_of};
use crate::core::BatchItem;
use crate::evict::Evictor;
use crate::programs::helper::{Gone, Line};
use crate::programs::remote;
use crate::state::entry::Place;
use hecaton_uffd::Uffd;
use hecaton_uffd::handover::{HELD, Op, Range};

impl Evictor {
    /// Keeps libc from changing the program's mappings until the pager sends the helper the next
    /// command. Passes over pages that moved meanwhile, and all pages if the helper's answer is not
    /// in `enough`.
    pub(super) fn hold(
        &mut self,
        first: usize,
        group: &mut [Victim],
        line: Line,
        enough: &[u32],
    ) -> Result<(), Gone> {
        self.last_nonce += 1;
        let held = line.ask(Op::Hold, &[Range::default()], self.last_nonce)?;
        let is_held = held.first().is_some_and(|held| enough.contains(held));
        let mut core = self.shared.lock();
        for (i, victim) in group.iter_mut().enumerate().filter(|(_, victim)| victim.is_left()) {
            let BatchItem { key, now_at } = core.batch[first + i];
            let is_there = now_at == key && core.get(key).place() == Place::Resident;
            victim.passed_over |= !is_held || !is_there;
        }
        Ok(())
    }

    /// The helper drops what is at an address, whatever that is, and not before the pager has read
    /// of it. So here the program must not bring other pages there: libc changes no mappings
    /// meanwhile.
    pub(super) fn protect_copy_drop(
        &mut self,
        first: usize,
        group: &mut [Victim],
        line: Line,
        uffd: Uffd,
        pid: i32,
    ) {
        if self.hold(first, group, line, &[HELD]).is_err() {
            return;
        }
        let index = group[0].key.space();
        for run in runs_of(group, Victim::is_left) {
            // EAGAIN: the mappings are changing. The pages stay as they are for this time.
            if uffd.protect(run.start, run.len).is_err() {
                let end = run.start + run.len;
                let within = |v: &Victim| (run.start..end).contains(&v.key.address());
                self.skip(group, within);
            }
        }
        let pins = remote::has_pins(pid);
        for at in 0..group.len() {
            if !group[at].is_left() {
                continue;
            }
            let key = group[at].key;
            let mut core = self.shared.lock();
            let mapped = core.space(index).map(|space| space.mapped(key.vpn(), 1));
            drop(core);
            let only = |victim: &Victim| victim.key == key;
            match mapped {
                Some(Ok(pages)) if pages[0].present && pages[0].protected == Some(true) => {
                    if pins && pages[0].exclusive {
                        self.refuse(group, only);
                    }
                }
                // Reading a page that is not there would wait for ourselves; see also
                // `crate::evict::own_reads`.
                _ => self.skip(group, only),
            }
        }
        let addresses: Vec<u64> = group.iter().map(|victim| victim.key.address()).collect();
        self.copy(pid, first, group, |i| addresses[i], |_, victim| victim.is_left());
        let mut core = self.shared.lock();
        for (i, victim) in group.iter().enumerate().filter(|(_, victim)| victim.is_droppable()) {
            core.state.batch.dropping(first + i);
            core.own_drop.insert(victim.key, 0);
        }
        drop(core);
        // Also if there is nothing to drop: libc goes on after this.
        let runs = runs_of(group, Victim::is_droppable);
        self.last_nonce += 1;
        if line.ask(Op::Drop, &runs, self.last_nonce).is_err() {
            return;
        }
        let mut core = self.shared.lock();
        let reports = std::mem::take(&mut core.own_drop);
        for (i, victim) in group.iter_mut().enumerate().filter(|(_, victim)| victim.is_droppable())
        {
            // Whether it was dropped is seen where it is now: the program may have unmapped it, or
            // moved it since. Nobody can have brought it back.
            let now_at = core.batch[first + i].now_at;
            let mapped = core.space(index).map(|space| space.mapped(now_at.vpn(), 1));
            victim.taken = matches!(mapped, Some(Ok(pages)) if !pages[0].present);
            if reports.get(&victim.key).is_some_and(|&reports| reports > 1) {
                core.discard(now_at);
            }
        }
        // Pages that stay are still protected, which costs their next writer a fault. Unprotecting
        // by address would be wrong: another page may be there by now.
    }
}
