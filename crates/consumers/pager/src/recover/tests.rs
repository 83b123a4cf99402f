//! Checks the tables against a model, through random forks, evictions, process ends and pager
//! deaths: each process reads what it wrote last, or has from its parent.
//!
//! The model has the program's memory, the kernel and the donors; the pager has all page places.
//! Nothing depends on a clock or other threads, so a seed determines a run. `HECATON_SEEDS=N` runs
//! N seeds, `HECATON_SEED=S` just one. With an even seed the pager never dies.

use super::*;
use crate::core::{BatchItem, Fetch};
use crate::evict::settle;
use crate::evict::take::Victim;
use crate::fault::fetch::Arrival;
use crate::programs::helper::Helper;
use crate::programs::inherit::tests::{PARENT, connection, pager};
use crate::state::space_pages::GiveBack;
use hecaton_memory::{SplitMix, page_sum};
use std::collections::VecDeque;

const DEFAULT_SEEDS: u64 = 100;
const STEPS: usize = 1200;
const NAME: &str = "every_process_reads_what_it_wrote_whatever_ends_in_between";

/// Few pages and processes, so that they meet: the first pages of each chunk from `FIRST` on.
const CHUNKS: u64 = 3;
const PAGES_IN_CHUNK: u64 = 3;
const FIRST: u64 = 1 << 20;
const PROCESSES: usize = 5;

/// Staging slots that may be used, so that what is in them has to make room.
const SLOTS: usize = 8;

/// Pages in a batch.
const BATCH: usize = 6;

/// A page on its way to a donor.
#[derive(Clone, Copy)]
struct Write {
    page: u64,
    sum: PageSum,
    slot: u32,
    contents: u64,
}

/// Counts of events that the seeds must reach.
#[derive(Default, Debug)]
struct Tally {
    forks: u64,
    deaths: u64,
    given_back: u64,
    /// Pages that came ahead when they were staged already, for another process.
    met_in_staging: u64,
}

struct World {
    core: Core,
    random: SplitMix,
    tally: Tally,
    /// Whether pagers die in it.
    is_deadly: bool,
    /// The last contents that any page was given. 0 is nothing.
    last_contents: u64,
    /// Expected contents of each page of each process.
    contents: BTreeMap<Key, u64>,
    /// Pages in their process's memory.
    present: BTreeSet<Key>,
    /// Contents of the space's pages at the donors.
    donors: HashMap<u64, u64>,
    unsent: Vec<Write>,
    in_flight: VecDeque<Write>,
    /// Emptied slots of the space to which writes may be under way.
    emptied: Vec<u32>,
    giving_back: Option<GiveBack>,
    fetches: Vec<Fetch>,
    victims: Vec<Victim>,
}

fn page_with(contents: u64) -> [u8; PAGE_SIZE] {
    let mut page = [0; PAGE_SIZE];
    page[..8].copy_from_slice(&contents.to_ne_bytes());
    page
}

/// The processes' pages, by number.
fn vpn(number: u64) -> u64 {
    FIRST + number / PAGES_IN_CHUNK * CHUNK_PAGES + number % PAGES_IN_CHUNK
}

/// Leaves [`SLOTS`] staging slots.
fn crowd(core: &mut Core) {
    while core.staging.available() > SLOTS {
        core.take_slot();
    }
}

impl World {
    fn new(seed: u64) -> World {
        let mut core = pager();
        let program = core.spaces[PARENT].as_mut().expect("the first program");
        // Closed when it ends.
        program.helper = Some(Helper::only_connection(connection()));
        program.advance(&core.state, PARENT, Stage::Live);
        crowd(&mut core);
        World {
            core,
            random: SplitMix::new(seed),
            tally: Tally::default(),
            is_deadly: seed % 2 == 1,
            last_contents: 0,
            contents: BTreeMap::new(),
            present: BTreeSet::new(),
            donors: HashMap::new(),
            unsent: Vec::new(),
            in_flight: VecDeque::new(),
            emptied: Vec::new(),
            giving_back: None,
            fetches: Vec::new(),
            victims: Vec::new(),
        }
    }

    fn below(&mut self, end: usize) -> usize {
        (self.random.draw() % end as u64) as usize
    }

    fn chance(&mut self, one_in: usize) -> bool {
        self.below(one_in) == 0
    }

    fn a_process(&mut self) -> usize {
        let live: Vec<usize> = self.core.live_spaces().map(|(index, _)| index).collect();
        live[self.below(live.len())]
    }

    fn a_page(&mut self) -> Key {
        let process = self.a_process();
        Key::new(process, vpn(self.below((CHUNKS * PAGES_IN_CHUNK) as usize) as u64))
    }

    /// All pages in that place.
    fn pages_in(&mut self, place: Place) -> Vec<Key> {
        let keys: Vec<Key> = self.contents.keys().copied().collect();
        keys.into_iter()
            .filter(|&key| self.core.get(key).place() == place && !self.core.get(key).is_busy())
            .collect()
    }

    fn one_of(&mut self, keys: &[Key]) -> Option<Key> {
        if keys.is_empty() { None } else { Some(keys[self.below(keys.len())]) }
    }

    /// Contents of a page of the space, as a reader finds them.
    fn stored(&self, page: u64) -> u64 {
        let record = self.core.pages.record(&self.core.state, page);
        let contents = match record.slot() {
            // SAFETY: a slot's bytes, which only this test uses.
            Some(slot) => unsafe { self.core.state.slot(slot).cast::<u64>().read() },
            None => {
                assert!(record.is_stored(), "page {page} is nowhere");
                self.donors.get(&page).copied().unwrap_or(0)
            }
        };
        assert_eq!(record.sum(), page_sum(&page_with(contents)), "page {page} is another one");
        contents
    }

    /// It comes into the process's memory, if it was out, and is written to, or only read.
    fn touch(&mut self, key: Key, write: bool) {
        let entry = self.core.get(key);
        if entry.is_busy() || entry.place() == Place::Fetching {
            return;
        }
        if write {
            self.last_contents += 1;
            self.contents.insert(key, self.last_contents);
        } else if entry.place() == Place::Zero {
            return;
        }
        let dirty = write || entry.place() == Place::Resident && entry.is_dirty();
        let entry = entry.with_place(Place::Resident).with_dirty(dirty);
        self.core.set(key, entry);
        if self.present.insert(key) {
            self.core.count_in(key, Installed::Demand);
        }
        if write {
            self.core.spare_place(key);
        }
    }

    fn fork(&mut self) {
        let parent = self.a_process();
        let is_taken = self.core.batch.iter().any(|item| item.key.space() == parent);
        if is_taken || self.core.live_spaces().count() == PROCESSES {
            return;
        }
        self.tally.forks += 1;
        let child = self.core.copy_for_child(parent, connection()).expect("there is room");
        let space = self.core.spaces[child].as_mut().expect("just made");
        space.advance(&self.core.state, child, Stage::Live);
        let parents = Key::new(parent, 0)..Key::new(parent + 1, 0);
        let childs = |key: &Key| Key::new(child, key.vpn());
        let contents: Vec<_> =
            self.contents.range(parents.clone()).map(|(key, &is)| (childs(key), is)).collect();
        let present: Vec<_> = self.present.range(parents).map(childs).collect();
        self.contents.extend(contents);
        self.present.extend(present);
    }

    fn end(&mut self) {
        let process = self.a_process();
        if self.core.live_spaces().count() > 1 {
            self.contents.retain(|key, _| key.space() != process);
            self.present.retain(|key| key.space() != process);
            self.core.end_space(process);
        }
    }

    fn free(&mut self, key: Key) {
        self.contents.remove(&key);
        self.present.remove(&key);
        self.core.discard(key);
    }

    /// Step 1 of an eviction.
    fn claim(&mut self) {
        if !self.core.batch.is_empty() {
            return;
        }
        let mut keys = self.pages_in(Place::Resident);
        while keys.len() > BATCH || !keys.is_empty() && self.chance(4) {
            let at = self.below(keys.len());
            keys.remove(at);
        }
        let core = &mut self.core;
        core.state.batch.begin(keys.iter().map(|key| key.0));
        core.batch = keys.iter().map(|&key| BatchItem { key, now_at: key }).collect();
        for key in keys {
            let entry = core.get(key);
            core.set(key, entry.with_busy(true));
            let clean = entry.is_clean_resident() && entry.space_page().is_some();
            let slot = if clean { None } else { core.take_slot() };
            self.victims.push(Victim::new(key, clean, slot));
        }
    }

    /// Steps 2 and 3 for one page.
    fn take(&mut self, at: usize) {
        let Victim { key, clean, slot, taken, .. } = self.victims[at];
        if taken || !self.present.contains(&key) {
            return;
        }
        if !clean {
            let Some(slot) = slot else { return };
            let page = page_with(self.contents[&key]);
            // SAFETY: the slot was taken for this page.
            unsafe { self.core.state.slot(slot).copy_from(page.as_ptr(), PAGE_SIZE) };
            self.core.state.batch.copied(at, slot);
            self.victims[at].copied = true;
            self.victims[at].content = Some(examine(&page));
        }
        self.present.remove(&key);
        self.victims[at].taken = true;
    }

    /// Step 4.
    fn settle(&mut self) {
        let victims = std::mem::take(&mut self.victims);
        let written = settle(&mut self.core, &victims);
        self.stage(written);
    }

    fn stage(&mut self, written: Unwritten) {
        for (page, sum, slot) in written {
            // SAFETY: a slot's bytes, which only this test uses.
            let contents = unsafe { self.core.state.slot(slot).cast::<u64>().read() };
            self.unsent.push(Write { page, sum, slot, contents });
        }
    }

    /// As [`crate::evict::write_out::Writer::forget_superseded`].
    fn forget_superseded(&mut self) {
        let core = &mut self.core;
        self.unsent.retain(|&Write { page, sum, slot, .. }| {
            let record = core.pages.record(&core.state, page);
            let is_wanted = record.slot() == Some(slot) && record.refs() > 0;
            if !is_wanted {
                core.staging.written(&core.state, &core.pages, slot, page, sum);
            }
            is_wanted
        });
    }

    fn send(&mut self) {
        self.forget_superseded();
        self.in_flight.extend(self.unsent.drain(..));
    }

    fn acknowledge(&mut self) {
        let Some(Write { page, sum, slot, contents }) = self.in_flight.pop_front() else { return };
        self.donors.insert(page, contents);
        let core = &mut self.core;
        core.staging.written(&core.state, &core.pages, slot, page, sum);
    }

    /// As the evictor does it after each batch.
    fn let_emptied_leave(&mut self) {
        self.emptied.append(&mut self.core.pages.take_emptied());
        self.forget_superseded();
        let in_flight = &self.in_flight;
        let is_quiet =
            |slot: &mut u32| in_flight.iter().all(|w| w.page / CHUNK_PAGES != u64::from(*slot));
        for slot in self.emptied.extract_if(.., is_quiet) {
            self.core.pages.may_leave(slot);
        }
    }

    fn give_back(&mut self) {
        match self.giving_back.take() {
            None => self.giving_back = self.core.pages.next_to_give_back(),
            Some(what) => {
                let done = !self.chance(4);
                if done {
                    self.tally.given_back += 1;
                    self.donors.retain(|page, _| !what.pages().contains(page));
                }
                self.core.pages.gave_back(&what, done);
            }
        }
        if self.chance(8) {
            self.core.pages.try_again();
        }
    }

    /// All processes that have the page at this address fetch it ahead.
    fn fetch(&mut self) {
        let out = self.pages_in(Place::Out);
        let Some(one) = self.one_of(&out) else { return };
        for key in out.into_iter().filter(|key| key.vpn() == one.vpn()) {
            let core = &mut self.core;
            let page = core.get(key).space_page().expect("it is out");
            if core.pages.record(&core.state, page).slot().is_none() {
                let first = self.fetches.len();
                core.fetch_ahead(key, page, false, &mut self.fetches, first).trigger = Some(key);
                core.coming_triggers.insert(key);
            }
        }
    }

    fn arrive(&mut self) {
        if self.fetches.is_empty() {
            return;
        }
        let at = self.below(self.fetches.len());
        let fetch = self.fetches.swap_remove(at);
        let data = page_with(self.donors.get(&fetch.pages[0]).copied().unwrap_or(0));
        let record = self.core.pages.record(&self.core.state, fetch.pages[0]);
        self.tally.met_in_staging += u64::from(record.slot().is_some());
        let came = Arrival { from: 0, data: &data, opened: None };
        let mut damaged = Vec::new();
        self.core.arrived(&fetch, &came, &mut damaged);
        assert!(damaged.is_empty(), "page {} is another one at its donor", fetch.pages[0]);
    }

    /// The pager is killed between two words that belong together, if there are such at the moment.
    fn die(&mut self) {
        let core = &mut self.core;
        match self.random.draw() % 4 {
            // It was freed, and its page still counts it.
            0 => {
                let key = self.a_page();
                let entry = self.core.get(key);
                if !entry.is_busy() {
                    self.contents.remove(&key);
                    self.present.remove(&key);
                    self.core.set(key, Entry::ZERO);
                }
            }
            // Its page is not named yet.
            1 => {
                let key = self.a_page();
                self.core.new_page(key);
            }
            // The page's record names the slot of its evicted copy, and the slot not yet the page.
            2 => {
                let taken = self.victims.iter().find(|victim| victim.taken && victim.copied);
                let Some((key, slot)) = taken.and_then(|taken| Some((taken.key, taken.slot?)))
                else {
                    return;
                };
                let Some(page) = core.get(key).space_page() else { return };
                let record = core.pages.record(&core.state, page);
                if record.refs() == 1 {
                    let record = record.with_slot(Some(slot)).with_stored(false);
                    core.pages.set_record(&core.state, page, record);
                }
            }
            // The same when it came ahead.
            _ => {
                let out = self.pages_in(Place::Out);
                let Some(key) = self.one_of(&out) else { return };
                let core = &mut self.core;
                let page = core.get(key).space_page().expect("it is out");
                let record = core.pages.record(&core.state, page);
                if record.slot().is_none()
                    && let Some(slot) = core.take_slot()
                {
                    let contents = page_with(self.donors[&page]);
                    // SAFETY: the slot was taken for this page.
                    unsafe { core.state.slot(slot).copy_from(contents.as_ptr(), PAGE_SIZE) };
                    core.pages.set_record(&core.state, page, record.with_slot(Some(slot)));
                }
            }
        }
    }

    /// The next pager takes over.
    fn take_over(mut self) -> World {
        self.tally.deaths += 1;
        self.die();
        while let Some(write) = self.in_flight.pop_front() {
            if self.chance(2) {
                self.donors.insert(write.page, write.contents);
            }
        }
        if let Some(what) = self.giving_back.take()
            && self.chance(2)
        {
            self.donors.retain(|page, _| !what.pages().contains(page));
        }
        let clean: BTreeSet<Key> = {
            let core = &mut self.core;
            let is_clean = |key: &&Key| core.get(**key).is_clean_resident();
            self.present.iter().filter(is_clean).copied().collect()
        };
        let Core { state, guard, limit, target, .. } = self.core;
        let mut core = Core::new(state, guard, limit);
        core.target = target;
        core.load_spaces();
        let present = &self.present;
        let unwritten = core.reconcile_with(&mut |_, first| {
            let pages = (0..CHUNK_PAGES).map(|i| first.plus(i));
            Ok(pages
                .map(|key| Mapped {
                    present: present.contains(&key),
                    protected: Some(clean.contains(&key)),
                    exclusive: true,
                })
                .collect())
        });
        crowd(&mut core);
        let mut world = World {
            core,
            unsent: Vec::new(),
            emptied: Vec::new(),
            fetches: Vec::new(),
            victims: Vec::new(),
            ..self
        };
        world.stage(unwritten);
        world
    }

    fn run(mut self) -> Tally {
        for _ in 0..STEPS {
            self = self.step();
            self.check();
        }
        self.settle();
        let left: Vec<usize> = self.core.live_spaces().map(|(index, _)| index).collect();
        left.into_iter().for_each(|process| self.core.end_space(process));
        assert_eq!(self.core.pages.in_use(), 0, "nobody is left");
        self.tally
    }

    fn step(mut self) -> World {
        match self.below(100) {
            0..22 => {
                let key = self.a_page();
                self.touch(key, true);
            }
            22..32 => {
                let key = self.a_page();
                self.touch(key, false);
            }
            32..37 => self.fork(),
            37..40 => self.end(),
            40..46 => {
                let key = self.a_page();
                self.free(key);
            }
            46..54 => self.claim(),
            54..64 if !self.victims.is_empty() => {
                let at = self.below(self.victims.len());
                self.take(at);
            }
            54..72 => self.settle(),
            72..78 => self.send(),
            78..84 => self.acknowledge(),
            84..88 => self.let_emptied_leave(),
            88..93 => self.give_back(),
            93..95 => self.fetch(),
            95..97 => self.arrive(),
            97 => {
                let is_at_target = self.core.target.is_some();
                self.core.target = if is_at_target { None } else { Some(4) };
            }
            _ if self.is_deadly && self.chance(6) => return self.take_over(),
            _ => {}
        }
        self
    }

    /// Asserts the invariants of the tables.
    fn check(&mut self) {
        let mut named: BTreeMap<u64, u64> = BTreeMap::new();
        for (_, page) in self.core.all_named_pages() {
            *named.entry(page).or_default() += 1;
        }
        let counted = |page: &u64| self.core.pages.record(&self.core.state, *page).refs();
        for (page, &count) in &named {
            assert_eq!(counted(page), count, "entries that name page {page}");
        }
        self.core.pages.assert_sound(named.keys().copied());
        let away = |what: &GiveBack| named.range(what.pages()).next().map(|(&page, _)| page);
        assert_eq!(self.giving_back.as_ref().and_then(away), None, "it is being given back");

        let contents: Vec<_> = self.contents.iter().map(|(&key, &is)| (key, is)).collect();
        for (key, is) in contents {
            let entry = self.core.get(key);
            assert_ne!(entry.place(), Place::Zero, "{key:?} is lost");
            if entry.place() != Place::Resident || entry.is_clean_resident() {
                let page = entry.space_page().expect("what can be dropped is in the pool");
                assert_eq!(self.stored(page), is, "{key:?}, which names page {page}");
            }
        }
    }
}

#[test]
fn every_process_reads_what_it_wrote_whatever_ends_in_between() {
    let number = |name| std::env::var(name).ok().map(|seed| seed.parse().expect("a number"));
    let seeds = match number("HECATON_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("HECATON_SEEDS").unwrap_or(DEFAULT_SEEDS),
    };
    let mut total = Tally::default();
    for seed in seeds.clone() {
        let ran = std::panic::catch_unwind(|| World::new(seed).run());
        let tally = ran.unwrap_or_else(|_| {
            panic!("seed {seed} fails: HECATON_SEED={seed} cargo test -p hecaton-pager {NAME}")
        });
        total.forks += tally.forks;
        total.deaths += tally.deaths;
        total.given_back += tally.given_back;
        total.met_in_staging += tally.met_in_staging;
    }
    let Tally { forks, deaths, given_back, met_in_staging } = total;
    let is_all = seeds.contains(&0) && seeds.contains(&(DEFAULT_SEEDS - 1));
    for reached in [forks, deaths, given_back, met_in_staging] {
        assert!(reached > 0 || !is_all, "the seeds do not reach everything: {total:?}");
    }
}
