//! Takes pages from a program and copies them into staging: steps 2 and 3 of an eviction (see
//! [`crate::evict`]).
//!
//! Where the kernel can move pages, the program's helper moves them into its area, and they are
//! copied from there ([`moving`]). Where it cannot, they are protected, copied where they are, and
//! dropped by the helper ([`dropping`]). Guest RAM is taken without a helper:
//! [`crate::guest::evict`].

mod dropping;
mod moving;

use crate::evict::Evictor;
use crate::fault::Content;
use crate::programs::remote;
use crate::state::tables::Key;
use hecaton_memory::PAGE_SIZE;
use hecaton_uffd::handover::Range;
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
    /// The kernel moves no pages of its memory at present.
    pub(crate) immovable: bool,
    /// Out of the program's reach.
    pub(crate) taken: bool,
    /// In its slot.
    pub(crate) copied: bool,
    pub(crate) content: Option<Content>,
}

impl Victim {
    /// A page that was claimed; `slot` is where its copy will be, unless it needs none.
    pub(crate) fn new(key: Key, clean: bool, slot: Option<u32>) -> Victim {
        Victim {
            key,
            clean,
            slot,
            passed_over: false,
            immovable: false,
            taken: false,
            copied: false,
            content: None,
        }
    }

    /// Whether it is to be taken yet.
    pub(crate) fn is_left(&self) -> bool {
        !self.taken && !self.passed_over
    }

    fn is_movable(&self) -> bool {
        self.is_left() && !self.immovable
    }

    /// Whether nothing is lost if it goes now.
    pub(crate) fn is_droppable(&self) -> bool {
        self.is_left() && (self.clean || self.copied)
    }
}

impl Evictor {
    /// Steps 2 and 3 for the pages of one address space. `first` is the first one's place in the
    /// batch.
    pub(crate) fn take(&mut self, first: usize, group: &mut [Victim]) {
        let (helper, uffd, pid) = {
            let core = self.shared.lock();
            let index = group[0].key.space();
            let addresses = group.iter().map(|victim| victim.key.address());
            let Some(Some(space)) = core.spaces.get(index) else { return };
            if let Some(places) = space.file_places(addresses) {
                let uffd = space.uffd;
                drop(core);
                return self.take_from_files(first, group, uffd, &places);
            }
            let Some(helper) = core.helper(index) else { return };
            let space = core.spaces[index].as_ref().expect("it has a helper");
            (helper, space.uffd, space.pid.expect("a space with a helper has a process"))
        };
        let line = helper.line(uffd);
        let goes_on = helper.area == 0 || self.move_away(first, group, &helper, line, pid);
        if goes_on && group.iter().any(Victim::is_left) {
            self.protect_copy_drop(first, group, line, uffd, pid);
        }
        // Pages may be in the area that the helper has not told of. No thread of the program may
        // run on after it has been given zeros for one.
        if group.iter().any(Victim::is_left) && line.ends_within(Duration::ZERO) {
            self.shared.lock().lose_helper(group[0].key.space());
        }
    }

    /// These pages are not evicted this time.
    pub(crate) fn skip(&mut self, group: &mut [Victim], which: impl Fn(&Victim) -> bool) {
        let mut guard = self.shared.lock();
        let core = &mut *guard;
        for victim in group.iter_mut().filter(|victim| victim.is_left() && which(victim)) {
            victim.passed_over = true;
            if let Some(slot) = victim.slot.take() {
                core.staging.forget(&core.state, slot);
            }
        }
    }

    /// Counts pages that the kernel refuses to give up, and leaves them.
    fn refuse(&mut self, group: &mut [Victim], which: impl Fn(&Victim) -> bool) {
        let refused = group.iter().filter(|victim| victim.is_left() && which(victim)).count();
        self.shared.lock().stats.evictions_refused += refused as u64;
        self.skip(group, which);
    }

    /// Copies the chosen pages that need it into their slots, in one call: all, or none if the
    /// process has gone.
    fn copy(
        &mut self,
        pid: i32,
        first: usize,
        group: &mut [Victim],
        address: impl Fn(usize) -> u64,
        chosen: impl Fn(usize, &Victim) -> bool,
    ) {
        let space = group[0].key.space();
        let mut core = self.shared.lock();
        let mut to = Vec::with_capacity(group.len());
        let mut from: Vec<libc::iovec> = Vec::with_capacity(group.len());
        let mut items = Vec::with_capacity(group.len());
        for (i, victim) in group.iter().enumerate() {
            let (true, Some(slot)) = (chosen(i, victim), victim.slot) else { continue };
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
        let page_at = |&(i, _): &(usize, u32)| Key::new(space, address(i) / PAGE);
        core.own_reads.begin(items.iter().map(page_at));
        drop(core);
        if items.is_empty() {
            return;
        }
        // SAFETY: the slots were taken for this batch, so nobody else touches them.
        if !unsafe { remote::read(pid, &to, &from) } {
            // One page that may not be read (PROT_NONE) stops those behind it.
            let mut memory = remote::Memory::of(pid);
            let mut unread = Vec::new();
            items.retain(|&(i, slot)| {
                let to = self.shared.lock().state.slot(slot);
                // SAFETY: as above; a slot is a page.
                let to = unsafe { std::slice::from_raw_parts_mut(to.cast::<u8>(), PAGE_SIZE) };
                let is_read = memory.read(address(i), to);
                if !is_read {
                    unread.push(group[i].key);
                }
                is_read
            });
            self.refuse(group, |victim| unread.contains(&victim.key));
        }
        let mut core = self.shared.lock();
        core.own_reads.end();
        if items.is_empty() {
            drop(core);
            return self.note_end(space);
        }
        for (i, slot) in items {
            group[i].copied = true;
            core.state.batch.copied(first + i, slot);
        }
    }

    /// A program could not be read. If that is because it has ended, its helper ends too, if not at
    /// once: a thread's memory goes before its descriptors do.
    fn note_end(&mut self, index: usize) {
        let core = self.shared.lock();
        let line = core.helper(index).zip(core.uffd(index)).map(|(helper, uffd)| helper.line(uffd));
        drop(core);
        if line.is_none_or(|line| line.ends_within(DEATH_PATIENCE)) {
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
