//! Takes pages from a program and copies them into staging: steps 2 and 3 of an eviction (see
//! [`crate::evict`]).
//!
//! Where the kernel can move pages, the program's helper moves them into its area, and they are
//! copied from there. Where it cannot, or a fork shares them, they are protected, copied where they
//! are, and dropped by the helper. Guest RAM is taken without a helper: [`crate::guest::evict`].

use crate::core::BatchItem;
use crate::evict::Evictor;
use crate::fault::Content;
use crate::helper::{self, Helper};
use crate::remote;
use crate::state::entry::Place;
use crate::tables::Key;
use hecaton_memory::PAGE_SIZE;
use hecaton_uffd::handover::{Op, Range};
use std::time::Duration;

/// How long a program that cannot be read any more may take to end.
const DEATH_PATIENCE: Duration = Duration::from_secs(5);

const PAGE: u64 = PAGE_SIZE as u64;

/// A page of the batch as the evictor sees it.
pub(crate) struct Victim {
    pub(crate) key: Key,
    /// Needs no copy: the pool holds it.
    pub(crate) clean: bool,
    pub(crate) slot: Option<u32>,
    /// Stays this time.
    pub(crate) passed_over: bool,
    /// Out of the program's reach.
    pub(crate) taken: bool,
    /// In its slot.
    pub(crate) copied: bool,
    pub(crate) content: Option<Content>,
}

impl Victim {
    /// Whether nothing is lost if it goes now.
    pub(crate) fn is_droppable(&self) -> bool {
        !self.taken && !self.passed_over && (self.clean || self.copied)
    }
}

impl Evictor {
    /// Steps 2 and 3 for the pages of one address space. `first` is the first one's place in the
    /// batch.
    pub(crate) fn take(&mut self, first: usize, group: &mut [Victim]) {
        let (helper, uffd, pid) = {
            let mut core = self.shared.lock();
            let index = group[0].key.space();
            let addresses = group.iter().map(|victim| victim.key.address());
            let Some(Some(space)) = core.spaces.get(index) else { return };
            if let Some(places) = space.file_places(addresses) {
                let uffd = space.uffd;
                drop(core);
                return self.take_from_files(first, group, uffd, &places);
            }
            let Some(helper) = core.helper(index) else { return };
            let has_family = core.live_spaces().nth(1).is_some();
            let space = core.spaces[index].as_mut().expect("it has a helper");
            // Its helper would answer when it is continued, and everybody else would wait till then.
            space.stopped = has_family && space.is_stopped();
            if space.stopped {
                return;
            }
            (helper, space.uffd, space.pid.expect("a space with a helper has a process"))
        };
        if helper.area != 0 && !self.move_away(first, group, &helper, pid) {
            return;
        }
        if group.iter().any(|victim| !victim.taken) {
            self.protect_copy_drop(first, group, helper.socket, uffd, pid);
        }
    }

    /// Steps 2 and 3 where the kernel can move pages. False if the program has ended.
    ///
    /// The helper moves what is at an address, whatever that is. A thread that moves memory about
    /// (`mremap`) waits until the pager has read of it, and no other can put pages in the place of the
    /// first before that (`libhecaton.so` lets libc's calls take turns). So from here, where the
    /// addresses are made sure of, until the helper has answered nothing is read: a page that was
    /// moved meanwhile has left a hole, and is not taken.
    fn move_away(&mut self, first: usize, group: &mut [Victim], helper: &Helper, pid: i32) -> bool {
        let mut core = self.shared.lock();
        for (i, victim) in group.iter_mut().enumerate() {
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
        let runs = runs_of(group, |victim| !victim.passed_over);
        self.last_nonce += 1;
        let answer = helper::ask(helper.socket, Op::Take, &runs, self.last_nonce);
        self.shared.lock().taking = None;
        self.shared.taken.notify_all();
        let Ok(done) = answer else { return false };

        // Where in the area each page is: those that are not there were not asked for.
        let (mut ranks, mut rank) = (vec![0; group.len()], 0);
        let mut asked = (0..group.len()).filter(|&i| !group[i].passed_over);
        let mut moved_pages = Vec::with_capacity(group.len());
        for (run, moved) in runs.iter().zip(done) {
            for step in 0..run.len / PAGE {
                let i = asked.next().expect("as many as the runs have pages");
                ranks[i] = rank;
                rank += 1;
                if step < u64::from(moved) {
                    moved_pages.push(i);
                }
            }
        }
        moved_pages.into_iter().for_each(|i| group[i].taken = true);
        self.copy(pid, first, group, |i| helper.area + ranks[i] * PAGE, |victim| victim.taken);
        true
    }

    /// The way for kernels that cannot move pages, and for pages that a fork shares.
    ///
    /// The helper drops what is at an address, whatever that is, and not before the pager has read of
    /// it. So here the program must not bring other pages there: libc changes no mappings meanwhile.
    fn protect_copy_drop(
        &mut self,
        first: usize,
        group: &mut [Victim],
        socket: std::os::fd::RawFd,
        uffd: hecaton_uffd::Uffd,
        pid: i32,
    ) {
        self.last_nonce += 1;
        let held = helper::ask(socket, Op::Hold, &[Range::default()], self.last_nonce);
        let Ok(held) = held else { return };
        let index = group[0].key.space();
        let mut core = self.shared.lock();
        for (i, victim) in group.iter_mut().enumerate() {
            let BatchItem { key, now_at } = core.batch[first + i];
            let is_there = now_at == key && core.get(key).place() == Place::Resident;
            victim.passed_over |= held != [1] || !is_there;
        }
        drop(core);
        for run in runs_of(group, |victim| !victim.taken && !victim.passed_over) {
            // EAGAIN: the mappings are changing. The pages stay as they are for this time.
            if uffd.protect(run.start, run.len).is_err() {
                let end = run.start + run.len;
                let within = |v: &Victim| (run.start..end).contains(&v.key.address());
                self.skip(group, within);
            }
        }
        // Reading a page that is not there would wait for ourselves; see also `Core::fault`.
        for at in 0..group.len() {
            if group[at].taken || group[at].passed_over {
                continue;
            }
            let mut core = self.shared.lock();
            let mapped = core.space(index).map(|s| s.mapped(group[at].key.vpn(), 1));
            let safe = matches!(
                &mapped,
                Some(Ok(pages)) if pages[0].present && pages[0].protected == Some(true)
            );
            drop(core);
            if !safe {
                let key = group[at].key;
                self.skip(group, |victim| victim.key == key);
            }
        }
        let addresses: Vec<u64> = group.iter().map(|victim| victim.key.address()).collect();
        let to_copy =
            |victim: &Victim| !victim.taken && !victim.passed_over && victim.slot.is_some();
        self.copy(pid, first, group, |i| addresses[i], to_copy);
        let mut core = self.shared.lock();
        for (i, victim) in group.iter().enumerate().filter(|(_, victim)| victim.is_droppable()) {
            core.state.batch.dropping(first + i);
            core.own_drop.insert(victim.key, 0);
        }
        drop(core);
        // Also if there is nothing to drop: libc goes on after this.
        let runs = runs_of(group, Victim::is_droppable);
        self.last_nonce += 1;
        if helper::ask(socket, Op::Drop, &runs, self.last_nonce).is_err() {
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
        // What stays is protected still, which costs its next writer a fault. To lift that by address
        // would be wrong if another page has come there by now.
    }

    /// These pages are not evicted this time.
    pub(crate) fn skip(&mut self, group: &mut [Victim], which: impl Fn(&Victim) -> bool) {
        let mut guard = self.shared.lock();
        let core = &mut *guard;
        for victim in group.iter_mut().filter(|victim| !victim.taken && which(victim)) {
            victim.passed_over = true;
            if let Some(slot) = victim.slot.take() {
                core.staging.forget(&core.state, slot);
            }
        }
    }

    /// Copies the chosen pages that need it into their slots, in one call: all, or none if the
    /// process has gone.
    fn copy(
        &mut self,
        pid: i32,
        first: usize,
        group: &mut [Victim],
        address: impl Fn(usize) -> u64,
        chosen: impl Fn(&Victim) -> bool,
    ) {
        let core = self.shared.lock();
        let mut to = Vec::with_capacity(group.len());
        let mut from: Vec<libc::iovec> = Vec::with_capacity(group.len());
        let mut items = Vec::with_capacity(group.len());
        for (i, victim) in group.iter().enumerate() {
            let (true, Some(slot)) = (chosen(victim), victim.slot) else { continue };
            to.push(libc::iovec { iov_base: core.state.slot(slot).cast(), iov_len: PAGE_SIZE });
            let at = address(i);
            match from.last_mut() {
                Some(last) if last.iov_base as u64 + last.iov_len as u64 == at => {
                    last.iov_len += PAGE_SIZE;
                }
                _ => from.push(libc::iovec { iov_base: at as *mut _, iov_len: PAGE_SIZE }),
            }
            items.push((i, slot));
        }
        drop(core);
        if items.is_empty() {
            return;
        }
        // SAFETY: the slots were taken for this batch, so nobody else touches them.
        if !unsafe { remote::read(pid, &to, &from) } {
            return self.note_end(group[0].key.space());
        }
        let core = self.shared.lock();
        for (i, slot) in items {
            group[i].copied = true;
            core.state.batch.copied(first + i, slot);
        }
    }

    /// A program could not be read. If that is because it has ended, its connection ends too, if
    /// not at once: a thread's memory goes before its descriptors do.
    fn note_end(&mut self, index: usize) {
        let helper = self.shared.lock().helper(index);
        if helper.is_none_or(|helper| helper::has_ended(helper.socket, DEATH_PATIENCE)) {
            self.shared.lock().end_space(index);
        }
    }
}

/// The chosen pages of a sorted group as runs of neighbours.
pub(crate) fn runs_of(group: &[Victim], chosen: impl Fn(&Victim) -> bool) -> Vec<Range> {
    let mut runs: Vec<Range> = Vec::new();
    for victim in group.iter().filter(|victim| chosen(victim)) {
        let start = victim.key.address();
        match runs.last_mut() {
            Some(run) if run.start + run.len == start => run.len += PAGE,
            _ => runs.push(Range { start, len: PAGE }),
        }
    }
    runs
}
