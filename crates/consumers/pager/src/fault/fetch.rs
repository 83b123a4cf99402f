//! Asks donors for pages, for a fault or ahead of one, and maps what comes.

use super::{PAGE, let_write};
use crate::core::{Core, Fetch};
use crate::state::SEGMENT_PAGES;
use crate::state::entry::Place;
use crate::state::tables::Key;
use hecaton_memory::{PAGE_SIZE, PageSum, page_sum};
use hecaton_policy::evict::Installed;
use hecaton_policy::prefetch::Window;
use hecaton_space::SpaceError;
use hecaton_transport::protocol::MAX_PAGES;
use hecaton_uffd::Errno;
use hecaton_uffd::abi::UFFDIO_COPY_MODE_WP;
use std::ops::Range;

/// Pages of a fetch, as they come.
pub(crate) struct Arrival<'a> {
    /// Where in the fetch they begin.
    pub(crate) from: usize,
    /// Their contents, one after another.
    pub(crate) data: &'a [u8],
    /// If pages leave sealed: whether each of these is what was written.
    pub(crate) opened: Option<&'a [bool]>,
}

impl Arrival<'_> {
    /// Which pages of the fetch they are.
    pub(crate) fn pages(&self) -> Range<usize> {
        self.from..self.from + self.data.len() / PAGE_SIZE
    }

    fn page(&self, index: usize) -> &[u8] {
        &self.data[(index - self.from) * PAGE_SIZE..][..PAGE_SIZE]
    }
}

impl Core {
    /// Asks for the pages of a window that are in the pool and for which there is room.
    pub(super) fn prefetch(
        &mut self,
        window: Option<Window>,
        write: bool,
        fetches: &mut Vec<Fetch>,
    ) {
        let Some(window) = window else { return };
        // Faults come first: a window takes at most half of the room.
        let mut room = self.room() / 2;
        let first_request = fetches.len();
        let mut fetched = 0u32;
        let mut trigger = None;
        for (index, page_key) in window.pages().enumerate() {
            let key = Key(page_key);
            if room == 0 || key.space() >= self.spaces.len() {
                break;
            }
            let entry = self.get(key);
            let Some(page) = entry.space_page() else { continue };
            if entry.place() != Place::Out || entry.is_busy() {
                continue;
            }
            if self.pages.record(&self.state, page).slot().is_some() {
                continue;
            }
            let fetch = self.fetch_ahead(key, page, write, fetches, first_request);
            if trigger.is_none() && index as u32 >= window.trigger {
                trigger = Some(key);
                fetch.trigger = Some(key);
                self.coming_triggers.insert(key);
            }
            room -= 1;
            fetched += 1;
        }
        self.prefetcher.on_window_issued(&window, fetched, trigger.map(|key| key.0));
    }

    /// Has a page fetched that is out and that no thread waits for yet: with the last of `fetches`,
    /// if that is one of `fetches[first..]` and of the same segment, or by one more. Returns which.
    pub(crate) fn fetch_ahead<'a>(
        &mut self,
        key: Key,
        page: u64,
        write: bool,
        fetches: &'a mut Vec<Fetch>,
        first: usize,
    ) -> &'a mut Fetch {
        let fits = |fetch: &Fetch| {
            fetch.pages.len() < MAX_PAGES && fetch.pages[0] / SEGMENT_PAGES == page / SEGMENT_PAGES
        };
        if !fetches[first..].last().is_some_and(fits) {
            let tag = self.new_tag();
            fetches.push(Fetch { tag, write, ..Fetch::default() });
        }
        let fetch = fetches.last_mut().expect("pushed if there was none");
        let entry = self.get(key);
        fetch.keys.push(key);
        fetch.pages.push(page);
        fetch.stamps.push(entry.tag());
        self.set(key, entry.with_place(Place::Fetching).with_tag(fetch.tag).with_dirty(false));
        self.fetching += 1;
        fetch
    }

    /// Handles pages of `fetch` that have come. Puts the indices of damaged ones into `damaged`.
    pub(crate) fn arrived(&mut self, fetch: &Fetch, came: &Arrival<'_>, damaged: &mut Vec<usize>) {
        let pages = came.pages();
        self.stats.pages_in += pages.len() as u64;
        let mut at = pages.start;
        while at < pages.end {
            at += self.arrived_run(fetch, at, came, damaged);
        }
        if came.from == 0
            && let Some(since) = fetch.demanded_at
        {
            self.pool_latency.record(since.elapsed());
        }
    }

    fn wanted(&mut self, fetch: &Fetch, index: usize) -> bool {
        let entry = self.get(fetch.keys[index]);
        entry.place() == Place::Fetching && entry.tag() == fetch.tag
    }

    fn is_sound(&self, fetch: &Fetch, index: usize, came: &Arrival<'_>) -> bool {
        match came.opened {
            Some(opened) => opened[index - came.from],
            None => {
                let expected: PageSum = self.pages.record(&self.state, fetch.pages[index]).sum();
                page_sum(came.page(index)) == expected
            }
        }
    }

    /// Maps as many neighbouring pages as can be mapped alike; returns how many were dealt with.
    fn arrived_run(
        &mut self,
        fetch: &Fetch,
        first: usize,
        came: &Arrival<'_>,
        damaged: &mut Vec<usize>,
    ) -> usize {
        let key = fetch.keys[first];
        let available = came.pages().end.min(fetch.keys.len()) - first;
        if !self.wanted(fetch, first) {
            return 1;
        }
        if !self.is_sound(fetch, first, came) {
            self.stats.checksum_errors += 1;
            damaged.push(first);
            return 1;
        }
        let entry = self.get(key);
        if fetch.trigger == Some(key) && self.coming_triggers.remove(&key) {
            self.stage_trigger(fetch, first, came.page(first));
            return 1;
        }
        // At the target a page gives its place up when it comes: it is as good as written to.
        let unprotected = !self.protects(key) || self.is_at_target();
        let write =
            |entry: crate::state::entry::Entry| fetch.write || unprotected || entry.is_dirty();
        let writable = write(entry);
        let mut run = 1;
        while run < available {
            let next = fetch.keys[first + run];
            if next != key.plus(run as u64)
                || fetch.trigger == Some(next)
                || !self.wanted(fetch, first + run)
                || write(self.get(next)) != writable
                || !self.is_sound(fetch, first + run, came)
            {
                break;
            }
            run += 1;
        }
        let Some(uffd) = self.uffd(key.space()) else { return run };
        let mode = if writable { 0 } else { UFFDIO_COPY_MODE_WP };
        let data = came.page(first).as_ptr();
        let copied = uffd.copy(key.address(), data, run as u64 * PAGE, mode);
        let done = (copied.done / PAGE) as usize;
        for i in 0..done {
            let key = key.plus(i as u64);
            self.fetching -= 1;
            let distance = self.clock.distance(fetch.stamps[first + i]);
            let how = match fetch.demanded_at {
                Some(_) => Installed::Refault { distance },
                None => Installed::PrefetchedAgain { distance },
            };
            self.now_resident(key, writable, how);
        }
        if copied.error.is_none() {
            return run;
        }
        // The page at which it stopped.
        let key = key.plus(done as u64);
        let entry = self.get(key);
        self.fetching -= 1;
        if copied.error == Some(Errno(libc::EEXIST)) {
            self.now_resident(key, true, Installed::Demand);
            let_write(uffd, key);
        } else {
            // The mappings are changing or gone; whoever still wants the page faults again.
            let entry = entry.with_place(Place::Out).with_awaited(false).with_dirty(false);
            self.set(key, entry.with_tag(fetch.stamps[first + done]));
        }
        let _ = uffd.wake(key.address(), PAGE);
        done + 1
    }

    fn stage_trigger(&mut self, fetch: &Fetch, index: usize, data: &[u8]) {
        let (key, page) = (fetch.keys[index], fetch.pages[index]);
        let entry = self.get(key);
        self.fetching -= 1;
        let out = entry.with_place(Place::Out).with_dirty(false);
        self.set(key, out.with_tag(fetch.stamps[index]));
        // Another process that shares the page has asked for it as well: it is in one slot.
        let is_staged = self.pages.record(&self.state, page).slot().is_some();
        let Some(slot) = (!is_staged).then(|| self.take_slot()).flatten() else {
            return self.prefetcher.on_window_dead(key.0);
        };
        // SAFETY: the slot was taken, so nothing else uses its 4096 bytes.
        unsafe { self.state.slot(slot).copy_from(data.as_ptr(), PAGE_SIZE) };
        let record = self.pages.record(&self.state, page);
        self.pages.set_record(&self.state, page, record.with_slot(Some(slot)));
        self.staging.publish(&self.state, slot, page, record.is_stored());
        self.triggers.insert(slot, key);
    }

    /// The pages from `from` on will not come with this request: they are out again, and whoever
    /// waits for them faults again. The consumer cannot go on without what is lost and was wanted.
    ///
    /// Pages that were freed meanwhile are not: their segment may have been given back as a whole,
    /// and the donor then knows nothing of what it is asked for.
    pub(crate) fn fetch_failed(&mut self, fetch: &Fetch, from: usize, error: &SpaceError) {
        let pages = from..fetch.keys.len();
        let wanted: Vec<usize> = pages.filter(|&index| self.wanted(fetch, index)).collect();
        // A window that nobody may want is no reason to give a donor up: who waits for one of its
        // pages faults again, and asks for that page alone.
        let is_ahead = matches!(error, SpaceError::Away { .. }) && fetch.demanded_at.is_none();
        if !wanted.is_empty() && !error.is_transient() && !is_ahead {
            self.fail(error.to_string());
        }
        for index in wanted {
            let key = fetch.keys[index];
            self.end_fetch(key);
            let entry = self.get(key);
            let awaited = entry.is_awaited();
            let entry = entry.with_place(Place::Out).with_awaited(false).with_dirty(false);
            self.set(key, entry.with_tag(fetch.stamps[index]));
            if awaited && let Some(uffd) = self.uffd(key.space()) {
                let _ = uffd.wake(key.address(), PAGE);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::OnLoss;
    use crate::programs::inherit::tests::{PARENT, connection, pager, put_out};
    use crate::state::STAGING_SLOTS;
    use hecaton_memory::SpaceId;

    #[test]
    fn what_was_freed_while_it_was_asked_for_may_be_gone() {
        let mut core = pager();
        core.on_loss = OnLoss::Report;
        let space = SpaceId(7);
        let lost = SpaceError::Lost { space, segment: 0, donor: "one".into() };
        let mut fetches = Vec::new();
        for vpn in [1 << 20, (1 << 20) + 1] {
            let key = Key::new(PARENT, vpn);
            let page = put_out(&mut core, key);
            core.fetch_ahead(key, page, false, &mut fetches, 0);
        }
        let [fetch] = &fetches[..] else { panic!("they are asked for in one") };
        fetch.keys.iter().for_each(|&key| core.discard(key));
        core.fetch_failed(fetch, 0, &lost);
        assert_eq!(core.failed, None, "nobody wanted it");

        let key = Key::new(PARENT, 2 << 20);
        let page = put_out(&mut core, key);
        let mut fetches = Vec::new();
        core.fetch_ahead(key, page, false, &mut fetches, 0);
        core.fetch_failed(&fetches[0], 0, &lost);
        assert!(core.failed.is_some(), "what it wanted is lost");
    }

    /// The record of a page names one slot. If the page were in a second one too, that slot would
    /// still hold it when it is given to another page.
    #[test]
    fn a_page_that_two_processes_have_fetched_ahead_is_in_one_slot() {
        let mut core = pager();
        let key = Key::new(PARENT, 1 << 20);
        let page = put_out(&mut core, key);
        let data = [7; PAGE_SIZE];
        let record = core.pages.record(&core.state, page).with_sum(page_sum(&data));
        core.pages.set_record(&core.state, page, record);
        let child = core.copy_for_child(PARENT, connection()).unwrap();
        let mut fetches = Vec::new();
        for key in [key, Key::new(child, key.vpn())] {
            let first = fetches.len();
            core.fetch_ahead(key, page, false, &mut fetches, first).trigger = Some(key);
            core.coming_triggers.insert(key);
        }
        let mut slots = Vec::new();
        for fetch in &fetches {
            let came = Arrival { from: 0, data: &data, opened: None };
            let mut damaged = Vec::new();
            core.arrived(fetch, &came, &mut damaged);
            assert!(damaged.is_empty());
            assert_eq!(core.get(fetch.keys[0]).place(), Place::Out);
            slots.push(core.pages.record(&core.state, page).slot());
        }
        assert!(slots[0].is_some() && slots[0] == slots[1], "{slots:?}");
        // `take_slot` finds the slot's page, whose record must name the slot.
        for _ in 0..STAGING_SLOTS {
            core.take_slot().expect("none holds what is not at a donor");
        }
        assert_eq!(core.pages.record(&core.state, page).slot(), None);
        core.spaces[child].as_mut().unwrap().helper = None;
    }
}
