//! Makes room: chooses pages, takes them from the program, stages them, writes them out.
//!
//! One thread. A batch goes through these steps, and the lock is held only in the first and the
//! fourth:
//!
//! 1. *Claim*: the eviction order names up to 256 pages; they become busy, so faults on them wait.
//! 2. *Take*: the helper moves them out of the way of the program at one instant each (Linux 6.8),
//!    or, where that cannot be, they are write-protected and, once copied, dropped by the helper.
//! 3. *Copy* into staging, except what is clean and still in the pool.
//! 4. *Settle*: each page is out, or zero, or still there if it could not be taken. Threads that
//!    waited fault again, and are served from staging.
//! 5. *Write* what is staged to the donors, many batches in flight; a slot is free once they have
//!    acknowledged it.
//!
//! A writer that races with 2 has its write in the copy or waits until 4: the page cannot change
//! between its copy and its going. Nothing is dropped before it is in staging, and staging outlives
//! the pager, so a kill at any point loses nothing.

pub(crate) mod give_back;
pub(crate) mod own_reads;
mod room;
pub(crate) mod staging;
pub(crate) mod take;
pub(crate) mod turn;
pub(crate) mod write_out;

use crate::core::{BatchItem, Core};
use crate::evict::own_reads::OwnReads;
use crate::evict::take::Victim;
use crate::evict::write_out::Writer;
use crate::fault::{Content, examine};
use crate::programs::helper;
use crate::shared::Shared;
use crate::state::CHUNK_PAGES;
use crate::state::batch::MAX_BATCH;
use crate::state::entry::{Entry, Place};
use crate::state::tables::Key;
use hecaton_memory::PageSum;
use hecaton_policy::evict::Installed;
use hecaton_space::{Space, SpaceError};
use hecaton_uffd::handover::{Command, Op};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The evicting thread.
pub(crate) struct Evictor {
    pub(crate) shared: Arc<Shared>,
    pub(crate) writer: Writer,
    /// Slots of the space that nobody names any more, and that may still be written to.
    emptied: Vec<u32>,
    /// Nonce of the last question to a helper.
    pub(crate) last_nonce: u64,
    /// Pages tried, or passed over for a fork, since one could be taken.
    refused: u64,
}

/// Pause once every page was tried and none could be taken. The kernel reports no event when a
/// program unpins memory, so the evictor looks again after this time.
const NOTHING_TO_TAKE_PAUSE: Duration = Duration::from_millis(10);

/// About how many pages of programs that fork are passed over for one batch.
const MAX_KEPT: usize = 16 * MAX_BATCH;

impl Evictor {
    pub(crate) fn new(shared: Arc<Shared>, space: &Arc<Space>) -> Result<Evictor, SpaceError> {
        let writer = Writer::new(shared.clone(), space.lane()?);
        Ok(Evictor { shared, writer, emptied: Vec::new(), last_nonce: 0, refused: 0 })
    }

    /// Staged pages that a predecessor had not seen acknowledged.
    pub(crate) fn resume(&mut self, unwritten: Vec<(u64, PageSum, u32)>) {
        for (page, sum, slot) in unwritten {
            self.writer.stage(page, sum, slot);
        }
    }

    /// Puts an image into the pool first, if there is one; then runs until the consumer has ended.
    pub(crate) fn run(mut self, image: Option<&Path>) {
        self.shared.lock().own_reads = OwnReads::of_this_thread();
        if let Some(image) = image
            && let Err(error) = self.load_image(image)
        {
            self.shared.lock().fail(format!("{} cannot be loaded: {error}", image.display()));
        }
        while !self.shared.lock().over {
            self.writer.send();
            let idle = self.wait_for_work();
            if !idle {
                self.evict_batch();
            }
            self.make_way_for_forks();
            self.let_emptied_leave();
            self.writer.collect(None);
        }
    }

    fn make_way_for_forks(&self) {
        let mut core = self.shared.lock();
        if !core.wants_eviction() {
            core.turn.end();
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
            if self.writer.awaits_answers() {
                drop(core);
                self.writer.collect(Some(Duration::from_millis(1)));
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
            // have no helper, or that fork. In the second case, waiting would be for ever.
            if !self.writer.is_idle() {
                self.writer.collect(Some(Duration::from_millis(1)));
            } else {
                let mut core = self.shared.lock();
                let are_starved = self.refused >= core.resident && !core.starved.is_empty();
                if are_starved && core.turn.is_overdue(Instant::now()) {
                    core.grow_excess();
                }
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
                victim.content = Some(examine(self.shared.slot_bytes(slot)));
            }
        }
        let written = settle(&mut self.shared.lock(), &victims);
        for (page, sum, slot) in written {
            self.writer.stage(page, sum, slot);
        }
        self.clear_areas(&victims);
        self.pause_if_all_refused(&victims);
    }

    /// Gives faults memory above the limit once no page can be taken: they would wait for ever.
    fn pause_if_all_refused(&mut self, victims: &[Victim]) {
        let mut core = self.shared.lock();
        if victims.iter().any(|victim| victim.taken) {
            self.refused = 0;
            core.shrink_excess();
            return;
        }
        self.refused += victims.len() as u64;
        if self.refused < core.resident {
            return;
        }
        if !core.starved.is_empty() {
            core.grow_excess();
        }
        drop(core);
        std::thread::sleep(NOTHING_TO_TAKE_PAUSE);
    }

    /// Step 1.
    fn claim(&mut self) -> Vec<Victim> {
        let mut core = self.shared.lock();
        let core = &mut *core;
        // No page may leave a parent before its child has it. The evictor's turn comes when these
        // forks are done, whether more are wanted by then or not.
        let forking = core.spaces_that_fork();
        if forking.is_empty() {
            core.turn.end();
        } else {
            let now = Instant::now();
            core.turn.is_blocked(now);
            if !core.turn.goes_round_forks(now) {
                return Vec::new();
            }
        }
        // Small steps keep faults on the batch's pages from waiting long when little is needed.
        let reserve = core.reserve();
        let mut wanted = reserve + 64 - core.room_within_limit().min(reserve);
        if let Some(pages) = core.evict_to {
            wanted = wanted.max(core.resident.saturating_sub(pages));
        }
        let slots = core.staging.available();
        let most = (wanted as usize).clamp(32, MAX_BATCH).min(slots).min(core.limit as usize / 16);
        let mut places = Vec::with_capacity(most);
        let mut kept = Vec::new();
        {
            let (tables, state, spaces) = (&mut core.tables, &core.state, &core.spaces);
            let mut still = |place: u32| {
                let Some(key) = tables.key_at(state, place) else { return false };
                let entry = tables.get(state, key);
                if entry.place() != Place::Resident || entry.is_busy() {
                    return false;
                }
                let space = spaces[key.space()].as_ref().filter(|space| !space.gone);
                let stays = forking.contains(&key.space())
                    || space.is_some_and(|space| !space.is_under_way());
                if stays {
                    kept.push(place);
                    return kept.len() > MAX_KEPT;
                }
                let evictable = space.is_some_and(|space| space.can_give_up(key.address()));
                if evictable {
                    tables.set(state, key, entry.with_busy(true));
                }
                evictable
            };
            core.order.victims(most, &mut still, &mut places);
        }
        kept.sort_unstable();
        places.retain(|place| kept.binary_search(place).is_err());
        self.refused += kept.len() as u64;
        kept.into_iter().for_each(|place| core.order.installed(place, Installed::Demand));
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
                Victim::new(key, clean, slot)
            })
            .collect()
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

    /// Releases slots that no entry names, once no write to them is in flight: it could arrive
    /// after the discard.
    fn let_emptied_leave(&mut self) {
        self.emptied.append(&mut self.shared.lock().pages.take_emptied());
        if self.emptied.is_empty() {
            return;
        }
        self.writer.forget_superseded();
        let writer = &self.writer;
        let is_quiet = |slot: &mut u32| {
            let first = u64::from(*slot) * CHUNK_PAGES;
            !writer.is_writing(first..first + CHUNK_PAGES)
        };
        let quiet: Vec<u32> = self.emptied.extract_if(.., is_quiet).collect();
        let mut core = self.shared.lock();
        quiet.into_iter().for_each(|slot| core.pages.may_leave(slot));
        self.shared.give_back.notify_one();
    }
}

/// Step 4. Returns what is to be written: space page, sum, slot.
pub(crate) fn settle(core: &mut Core, victims: &[Victim]) -> Vec<(u64, PageSum, u32)> {
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
    core.count_own_fills();
    core.tear_down_gone();
    core.close_files();
    core.wake_waiting();
    core.note_peaks();
    written
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
            let page = core.put(|core| page_to_write(core, key, entry.space_page()));
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
    core.new_page(key)
}
