//! Makes room: chooses pages, takes them from the program, stages them, writes them out.
//!
//! One thread. A batch goes through these steps, and the lock is held only in the first and the
//! fourth:
//!
//! 1. *Claim*: the eviction order names up to 256 pages; they become busy, so faults on them wait.
//! 2. *Take*: the helper moves them out of the way of the program at one instant each (Linux 6.8),
//!    or, where that cannot be, they are write-protected and, once copied, dropped by the helper.
//! 3. *Copy* into staging, except what is clean and still in the pool.
//! 4. *Settle*: each page is out, or zero, or still there if it could not be taken. Who waited
//!    faults again, and is served from staging.
//! 5. *Write* what is staged to the donors, many batches in flight; a slot is free once they have
//!    acknowledged it.
//!
//! A writer that races with 2 has its write in the copy or waits until 4: the page cannot change
//! between its copy and its going. Nothing is dropped before it is in staging, and staging outlives
//! the pager, so a kill at any point loses nothing.

use crate::core::{BatchItem, Core, Shared, reserve};
use crate::fault::{Content, SEGMENT_PAGES, examine};
use crate::helper::{self, Helper};
use crate::remote;
use crate::state::CHUNK_PAGES;
use crate::state::batch::MAX_BATCH;
use crate::state::entry::{Entry, Place};
use crate::tables::Key;
use hecaton_memory::{PAGE_SIZE, PageSum};
use hecaton_policy::evict::Installed;
use hecaton_space::{Completion, Lane, Space, SpaceError};
use hecaton_transport::protocol::MAX_PAGES;
use hecaton_uffd::handover::{Command, Op, Range};
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long pages may wait for a donor with room before the consumer is ended: its memory is full
/// and so is the pool, and nobody else can help.
const PATIENCE: Duration = Duration::from_secs(10);

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
    passed_over: bool,
    /// Out of the program's reach.
    pub(crate) taken: bool,
    /// In its slot.
    pub(crate) copied: bool,
    content: Option<Content>,
}

impl Victim {
    /// Whether nothing is lost if it goes now.
    pub(crate) fn is_droppable(&self) -> bool {
        !self.taken && !self.passed_over && (self.clean || self.copied)
    }
}

/// Staged pages of one segment, ready to be sent.
#[derive(Default)]
struct Write {
    pages: Vec<u64>,
    sums: Vec<PageSum>,
    slots: Vec<u32>,
}

/// The evicting thread.
pub(crate) struct Evictor {
    pub(crate) shared: Arc<Shared>,
    space: Arc<Space>,
    lane: Lane,
    in_flight: HashMap<u64, Write>,
    /// Not sent yet, or to be sent again.
    unsent: Vec<Write>,
    next_token: u64,
    /// Since when no donor has had room.
    no_room_since: Option<Instant>,
}

impl Evictor {
    pub(crate) fn new(shared: Arc<Shared>, space: Arc<Space>) -> Result<Evictor, SpaceError> {
        Ok(Evictor {
            lane: space.lane()?,
            shared,
            space,
            in_flight: HashMap::new(),
            unsent: Vec::new(),
            next_token: 0,
            no_room_since: None,
        })
    }

    /// Staged pages that a predecessor had not seen acknowledged.
    pub(crate) fn resume(&mut self, unwritten: Vec<(u64, PageSum, u32)>) {
        for (page, sum, slot) in unwritten {
            self.stage_write(page, sum, slot);
        }
    }

    /// Puts an image into the pool first, if there is one; then runs until the consumer has ended.
    pub(crate) fn run(mut self, image: Option<&Path>) {
        self.shared.lock().evictor_thread = rustix::thread::gettid().as_raw_nonzero().get() as u32;
        if let Some(image) = image
            && let Err(error) = self.load_image(image)
        {
            self.shared.lock().fail(format!("{} cannot be loaded: {error}", image.display()));
        }
        while !self.shared.lock().over {
            self.send_unsent();
            let idle = self.wait_for_work();
            if !idle {
                self.evict_batch();
            }
            self.make_way_for_forks();
            self.discard_emptied();
            self.collect(None);
        }
    }

    /// The evictor has had its turn, if it could.
    fn make_way_for_forks(&self) {
        let mut core = self.shared.lock();
        if !core.is_forking() {
            core.eviction_is_next = None;
        }
        let forks_wait = !core.fork_requests.is_empty();
        drop(core);
        if forks_wait {
            self.shared.ring();
        }
    }

    /// True if there is nothing to evict, but perhaps something to collect.
    fn wait_for_work(&mut self) -> bool {
        let mut core = self.shared.lock();
        if !core.wants_eviction() {
            if !self.in_flight.is_empty() {
                drop(core);
                self.collect(Some(Duration::from_millis(1)));
                return true;
            }
            let until = Duration::from_millis(20);
            core = self.shared.evict.wait_timeout(core, until).expect("never poisoned").0;
        }
        !core.wants_eviction()
    }

    fn evict_batch(&mut self) {
        let mut victims = self.claim();
        if victims.is_empty() {
            // Nothing can be evicted just now: slots are being written, or all is in programs that
            // have no helper. In the latter case, waiting would be for ever.
            let waiting = !self.in_flight.is_empty() || !self.unsent.is_empty();
            if waiting {
                self.collect(Some(Duration::from_millis(1)));
            } else {
                let mut core = self.shared.lock();
                core.wake_waiting();
                drop(core);
                std::thread::sleep(Duration::from_millis(1));
            }
            return;
        }
        let mut first = 0;
        while first < victims.len() {
            let space = victims[first].key.space();
            let group = victims[first..].iter().take_while(|v| v.key.space() == space).count();
            self.take(first, &mut victims[first..first + group]);
            first += group;
        }
        for victim in &mut victims {
            if let (true, true, Some(slot)) = (victim.taken, victim.copied, victim.slot) {
                victim.content = Some(examine(self.slot_bytes(slot)));
            }
        }
        let written = self.settle(&victims);
        for (page, sum, slot) in written {
            self.stage_write(page, sum, slot);
        }
        self.clear_areas(&victims);
    }

    fn slot_bytes(&self, slot: u32) -> &'static [u8] {
        let at = self.shared.lock().state.slot(slot);
        // SAFETY: the staging memory is mapped for good, and a slot that is taken or unwritten is
        // not changed by anybody until its write has been acknowledged.
        unsafe { std::slice::from_raw_parts(at, PAGE_SIZE) }
    }

    /// Step 1.
    fn claim(&mut self) -> Vec<Victim> {
        let mut core = self.shared.lock();
        let core = &mut *core;
        if core.is_forking() {
            // No page may leave a parent before its child has it. The evictor's turn comes when
            // these forks are done, whether more are wanted by then or not.
            core.eviction_is_next.get_or_insert_with(Instant::now);
            return Vec::new();
        }
        // Small steps keep faults on the batch's pages from waiting long when little is needed.
        let mut wanted = reserve(core.limit) + 64 - core.room().min(reserve(core.limit));
        if let Some(pages) = core.evict_to {
            wanted = wanted.max(core.resident.saturating_sub(pages));
        }
        let slots = core.staging.available();
        let most = (wanted as usize).clamp(32, MAX_BATCH).min(slots).min(core.limit as usize / 16);
        let mut places = Vec::with_capacity(most);
        {
            let (tables, state, spaces) = (&mut core.tables, &core.state, &core.spaces);
            let mut still = |place: u32| {
                let Some(key) = tables.key_at(state, place) else { return false };
                let entry = tables.get(state, key);
                let space = spaces[key.space()].as_ref();
                let evictable = space
                    .is_some_and(|space| !space.gone && space.can_give_up(key.address()))
                    && entry.place() == Place::Resident
                    && !entry.is_busy();
                if evictable {
                    tables.set(state, key, entry.with_busy(true));
                }
                evictable
            };
            core.order.victims(most, &mut still, &mut places);
        }
        let key_at = |&place: &u32| core.tables.key_at(&core.state, place);
        let mut keys: Vec<Key> = places.iter().filter_map(key_at).collect();
        keys.sort_unstable();
        core.state.batch.begin(keys.iter().map(|key| key.0));
        core.batch = keys.iter().map(|&key| BatchItem { key, now_at: key }).collect();
        keys.into_iter()
            .map(|key| {
                let entry = core.get(key);
                let clean = entry.is_clean_resident() && entry.space_page().is_some();
                let slot = if clean { None } else { core.take_slot() };
                Victim {
                    key,
                    clean,
                    slot,
                    passed_over: false,
                    taken: false,
                    copied: false,
                    content: None,
                }
            })
            .collect()
    }

    /// Steps 2 and 3 for the pages of one address space. `first` is the first one's place in the
    /// batch.
    fn take(&mut self, first: usize, group: &mut [Victim]) {
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
        if helper.area != 0 && !self.move_away(first, group, &helper, pid) {
            return;
        }
        if group.iter().any(|victim| !victim.taken) {
            self.protect_copy_drop(first, group, helper.socket, uffd, pid);
        }
    }

    /// Steps 2 and 3 where the kernel can move pages. False if the program has ended.
    ///
    /// The helper moves what is at an address, whatever that is. A program that moves memory about
    /// (`mremap`) waits until the pager has read of it, and only then can it put other pages in the
    /// place of the first. So from here, where the addresses are made sure of, until the helper has
    /// answered nothing is read: a page that was moved meanwhile has left a hole, and is not taken.
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
        self.next_token += 1;
        let answer = helper::ask(helper.socket, Op::Take, &runs, self.next_token);
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
    fn protect_copy_drop(
        &mut self,
        first: usize,
        group: &mut [Victim],
        socket: std::os::fd::RawFd,
        uffd: hecaton_uffd::Uffd,
        pid: i32,
    ) {
        for run in runs_of(group, |victim| !victim.taken && !victim.passed_over) {
            // EAGAIN: the mappings are changing. The pages stay as they are for this time.
            if uffd.protect(run.start, run.len).is_err() {
                let end = run.start + run.len;
                let within = |v: &Victim| (run.start..end).contains(&v.key.address());
                self.skip(group, within);
            }
        }
        // Reading a page that is not there would wait for ourselves; see also `Core::fault`.
        let index = group[0].key.space();
        for at in 0..group.len() {
            if group[at].taken {
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
        let not_moved = |victim: &Victim| !victim.taken && victim.slot.is_some();
        self.copy(pid, first, group, |i| addresses[i], not_moved);
        let mut core = self.shared.lock();
        for (i, victim) in group.iter_mut().enumerate() {
            // What was copied is not at that address any more, and something else may be.
            victim.passed_over |= core.batch[first + i].now_at != victim.key;
            if victim.is_droppable() {
                core.state.batch.dropping(first + i);
                core.own_drop.insert(victim.key, 0);
            }
        }
        drop(core);
        let runs = runs_of(group, Victim::is_droppable);
        if runs.is_empty() {
            return;
        }
        self.next_token += 1;
        if helper::ask(socket, Op::Drop, &runs, self.next_token).is_err() {
            return;
        }
        let mut core = self.shared.lock();
        let reports = std::mem::take(&mut core.own_drop);
        for (i, victim) in group.iter_mut().enumerate().filter(|(_, victim)| victim.is_droppable())
        {
            // Whether it was dropped is seen where it is now: the program may have unmapped it, or
            // moved it out of the way. Nobody can have brought it back.
            let now_at = core.batch[first + i].now_at;
            let mapped = core.space(index).map(|space| space.mapped(now_at.vpn(), 1));
            victim.taken = matches!(mapped, Some(Ok(pages)) if !pages[0].present);
            if reports.get(&victim.key).is_some_and(|&reports| reports > 1) {
                core.discard(now_at);
            }
        }
        drop(core);
        for victim in group.iter().filter(|victim| !victim.taken && !victim.clean) {
            let _ = uffd.unprotect(victim.key.address(), PAGE);
        }
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

    /// Step 4. Returns what is to be written: space page, sum, slot.
    fn settle(&mut self, victims: &[Victim]) -> Vec<(u64, PageSum, u32)> {
        let mut guard = self.shared.lock();
        let core = &mut *guard;
        let mut written = Vec::new();
        let batch = std::mem::take(&mut core.batch);
        let mut evicted = 0;
        for (victim, item) in victims.iter().zip(&batch) {
            if item.now_at != item.key {
                let old = core.get(item.key);
                core.set(item.key, old.with_busy(false));
            }
            let writes = settle_one(core, victim, item.now_at);
            evicted += u64::from(victim.taken);
            written.extend(writes);
        }
        core.clock.advance(evicted);
        core.stats.pages_evicted += evicted;
        core.state.batch.end();
        core.tear_down_gone();
        core.close_files();
        core.wake_waiting();
        core.note_peaks();
        written
    }

    /// The pages in the area are in staging: the host can have their memory back.
    fn clear_areas(&self, victims: &[Victim]) {
        let mut cleared = usize::MAX;
        for victim in victims.iter().filter(|victim| victim.taken) {
            let index = victim.key.space();
            if index != cleared {
                cleared = index;
                let helper = self.shared.lock().helper(index);
                if let Some(helper) = helper.filter(|helper| helper.area != 0) {
                    // Gone: so is its area.
                    let _ = helper::send(helper.socket, &Command::new(Op::Clear, 0));
                }
            }
        }
    }

    pub(crate) fn stage_write(&mut self, page: u64, sum: PageSum, slot: u32) {
        let segment = page / SEGMENT_PAGES;
        let fits = |write: &&mut Write| {
            write.pages.len() < MAX_PAGES && write.pages[0] / SEGMENT_PAGES == segment
        };
        let write = match self.unsent.iter_mut().rev().find(fits) {
            // The same page twice in one request would leave it open which is written last.
            Some(write) if !write.pages.contains(&page) => write,
            _ => {
                self.unsent.push(Write::default());
                self.unsent.last_mut().expect("just pushed")
            }
        };
        write.pages.push(page);
        write.sums.push(sum);
        write.slots.push(slot);
    }

    /// Leaves out of what is to be sent the pages that nobody names any more, or that have newer
    /// contents elsewhere.
    fn forget_superseded(&mut self) {
        let mut guard = self.shared.lock();
        let core = &mut *guard;
        for write in &mut self.unsent {
            for i in (0..write.pages.len()).rev() {
                let (page, slot) = (write.pages[i], write.slots[i]);
                let record = core.pages.record(&core.state, page);
                if record.slot() != Some(slot) || record.refs() == 0 {
                    core.staging.written(&core.state, &core.pages, slot, page);
                    write.pages.swap_remove(i);
                    write.sums.swap_remove(i);
                    write.slots.swap_remove(i);
                }
            }
        }
        self.unsent.retain(|write| !write.pages.is_empty());
    }

    /// Step 5.
    pub(crate) fn send_unsent(&mut self) {
        if self.unsent.is_empty() {
            return;
        }
        self.forget_superseded();
        for write in std::mem::take(&mut self.unsent) {
            let data: Vec<&[u8]> = write.slots.iter().map(|&slot| self.slot_bytes(slot)).collect();
            self.next_token += 1;
            match self.lane.write(self.next_token, &write.pages, &write.sums, &data) {
                Ok(()) => {
                    self.no_room_since = None;
                    self.in_flight.insert(self.next_token, write);
                }
                Err(error) => self.keep(write, &error),
            }
        }
    }

    /// What could not be written stays staged, and is tried again: a donor may get room.
    fn keep(&mut self, write: Write, error: &SpaceError) {
        self.unsent.push(write);
        match error {
            SpaceError::Busy(_) => return self.collect(Some(Duration::from_millis(1))),
            error if error.is_transient() => {}
            SpaceError::NoRoom { .. } => {
                let since = *self.no_room_since.get_or_insert_with(Instant::now);
                if since.elapsed() > PATIENCE {
                    self.shared.lock().fail(error.to_string());
                }
            }
            error => self.shared.lock().fail(error.to_string()),
        }
        std::thread::sleep(Duration::from_millis(10));
    }

    /// Takes in acknowledgements; waits for one if `wait` says so.
    pub(crate) fn collect(&mut self, wait: Option<Duration>) {
        let mut failed = Vec::new();
        let (shared, in_flight) = (&self.shared, &mut self.in_flight);
        self.lane.progress(wait, &mut |completion| match completion {
            Completion::Written { token } => {
                let Some(write) = in_flight.remove(&token) else { return };
                let mut guard = shared.lock();
                let core = &mut *guard;
                core.stats.pages_out += write.pages.len() as u64;
                for (&page, &slot) in write.pages.iter().zip(&write.slots) {
                    core.staging.written(&core.state, &core.pages, slot, page);
                }
                if core.wants_eviction() {
                    shared.evict.notify_one();
                }
            }
            Completion::Failed { token, error, .. } => {
                if let Some(write) = in_flight.remove(&token) {
                    failed.push((write, error));
                }
            }
            Completion::Read { .. } => unreachable!("this lane only writes"),
        });
        for (write, error) in failed {
            self.keep(write, &error);
        }
    }

    /// Gives back what no entry names any more: pages to the donors' hosts, and whole extents.
    fn discard_emptied(&mut self) {
        let emptied = self.shared.lock().pages.take_emptied();
        for slot in emptied {
            // Everything is about to be given back at once, and a donor that is away would be waited
            // for with each page.
            if self.shared.lock().is_ending() {
                return;
            }
            // A write that is still under way to the slot must not come after the discard.
            let first = u64::from(slot) * CHUNK_PAGES;
            let in_slot = |page: &u64| page / CHUNK_PAGES == u64::from(slot);
            while self.in_flight.values().any(|write| write.pages.iter().any(in_slot)) {
                self.collect(Some(Duration::from_millis(10)));
            }
            self.forget_superseded();
            let segment = first / SEGMENT_PAGES;
            let per_segment = (SEGMENT_PAGES / CHUNK_PAGES) as u32;
            let of_segment = segment as u32 * per_segment..(segment as u32 + 1) * per_segment;
            let all_free = {
                let mut core = self.shared.lock();
                core.pages.discarded(slot);
                core.pages.are_free(of_segment)
            };
            let result = if all_free {
                self.space.free_segment(segment)
            } else {
                self.space.discard(first, CHUNK_PAGES)
            };
            if let Err(error) = result {
                tracing::warn!(%error, segment, "pages could not be given back");
            }
        }
    }
}

/// One page of a batch comes to its new place.
fn settle_one(core: &mut Core, victim: &Victim, key: Key) -> Option<(u64, PageSum, u32)> {
    let entry = core.get(key).with_busy(false);
    let free_slot = |core: &mut Core| {
        if let Some(slot) = victim.slot {
            core.staging.forget(&core.state, slot);
        }
    };
    if entry.place() != Place::Resident {
        // The program freed it meanwhile.
        core.set(key, entry);
        core.count_out(key, false);
        free_slot(core);
        return None;
    }
    if !victim.taken {
        core.set(key, entry);
        core.order.installed(core.tables.place_of(&core.state, key), Installed::Rescued);
        free_slot(core);
        return None;
    }
    let stamp = core.clock.stamp();
    let out = entry.with_place(Place::Out).with_dirty(false).with_tag(stamp);
    let (new, written) = match (&victim.content, victim.slot) {
        (Some(Content::Sum(sum)), Some(slot)) => {
            let page = page_to_write(core, key, entry.space_page());
            let record = core.pages.record(&core.state, page);
            if let Some(older) = record.slot() {
                core.staging.forget(&core.state, older);
            }
            let record = record.with_slot(Some(slot)).with_sum(*sum).with_stored(false);
            core.pages.set_record(&core.state, page, record);
            core.staging.publish(&core.state, slot, page, false);
            (out.with_space_page(Some(page)), Some((page, *sum, slot)))
        }
        (Some(Content::Zero), _) => {
            core.stats.pages_dropped_zero += 1;
            free_slot(core);
            if let Some(page) = entry.space_page() {
                core.release_page(page);
            }
            (Entry::ZERO, None)
        }
        _ if victim.clean => {
            core.stats.pages_dropped_clean += 1;
            (out, None)
        }
        _ => {
            // Taken and not copied: the program has ended, or it does not let itself be read any
            // more, and then the page is lost.
            free_slot(core);
            if core.spaces[key.space()].as_ref().is_some_and(|space| !space.gone) {
                core.fail("a page was taken from a program whose memory cannot be read".into());
            }
            if let Some(page) = entry.space_page() {
                core.release_page(page);
            }
            (Entry::ZERO, None)
        }
    };
    core.set(key, new);
    core.count_out(key, false);
    written
}

/// Where a dirty page's contents go: its old place if nobody else reads that.
fn page_to_write(core: &mut Core, key: Key, old: Option<u64>) -> u64 {
    if let Some(page) = old {
        if core.pages.record(&core.state, page).refs() == 1 {
            return page;
        }
        core.release_page(page);
    }
    core.pages.allocate(&core.state, key)
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
