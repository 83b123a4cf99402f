//! Does what [`stripe`](crate::stripe) decides: codes what has gone cold, works out shards that are
//! lost, and makes plain what is to be written.
//!
//! Pages go through the borrower for this, since no donor knows the code. All of it happens in the
//! threads that tend the space, below the bandwidth that copies are made with.

use crate::coded::code;
use crate::coded::stripe::{Coded, Rebuild};
use crate::copies::tend::Pace;
use crate::map::group::Place;
use crate::{Space, SpaceError};
use hecaton_memory::{PAGE_SIZE, PageNo, PageSum, is_zero, page_sum};
use hecaton_policy::cold::{self, Reading};
use hecaton_transport::client::Outcome;
use hecaton_transport::protocol::{MAX_PAGES, Refusal, Request};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::PoisonError;
use std::time::Duration;
use tracing::{error, info, warn};

/// Records coded stripes for a successor, and knows the sums of stored pages.
pub trait Record: Send + Sync {
    /// The stripe is coded, or is not any more. Returns when a successor would be told of it
    /// ([`Space::adopt`]).
    fn note(&self, stripe: u64, coded: Option<Coded>);

    /// The sum of what is stored for a page, if that is certain.
    fn sum_of(&self, page: PageNo) -> Option<PageSum>;
}

/// Longest time between two checks which segments are cold, and which stripes are read.
const LOOK: Duration = Duration::from_secs(1);

/// Observed use of a space.
#[derive(Default)]
pub(crate) struct Temperature {
    looked: Duration,
    /// How much each coded stripe is read.
    readings: BTreeMap<u64, Reading>,
    /// Time of the last attempt to code each stripe: a failed attempt is not repeated at once.
    tried: BTreeMap<u64, Duration>,
}

/// Pages of one shard, and which of them are not what was stored.
struct ShardPages {
    data: Vec<u8>,
    damaged: Vec<u32>,
}

impl Space {
    /// From here on what has gone cold is coded, by [`Space::tend`], if the space has a code. To be
    /// called once.
    pub fn code_what_is_cold(&self, record: Box<dyn Record>) {
        let _ = self.record.set(record);
    }

    /// Begins to code what has gone cold, and to warm what is read a lot.
    pub(crate) fn watch_temperature(&self) {
        let (Some(cold), Some(_)) = (self.config().cold, self.record.get()) else { return };
        let now = self.now();
        let mut temperature = self.temperature.lock().unwrap_or_else(PoisonError::into_inner);
        if now.saturating_sub(temperature.looked) < LOOK.min(cold.after / 4) {
            return;
        }
        temperature.looked = now;
        // The last stripe may reach beyond the end.
        let activity = |segment: u64| {
            let is_there = segment < self.config().segments();
            is_there.then(|| self.activity(segment)).flatten()
        };
        let is_cold = |segment: u64| {
            activity(segment).is_none_or(|activity| {
                cold::is_cold(activity.idle(now), cold.after) && !activity.is_written()
            })
        };
        let mut stripes = self.map().stripes_to_code(&is_cold);
        stripes.retain(|stripe| {
            let tried = temperature.tried.get(stripe);
            tried.is_none_or(|tried| now.saturating_sub(*tried) >= cold.after)
        });
        for stripe in stripes {
            temperature.tried.insert(stripe, now);
            // Published when the map is let go, and only then can it be known that no write is
            // under way.
            let is_frozen = self.map().freeze(stripe);
            let mut segments = cold.code.segments_of(stripe).filter_map(activity);
            if is_frozen && segments.any(|activity| activity.is_written()) {
                self.map().give_up_coding(stripe);
            }
        }
        let mut map = self.map();
        let coded: BTreeSet<u64> = map.coded().collect();
        temperature.readings.retain(|stripe, _| coded.contains(stripe));
        for stripe in coded {
            let segments = cold.code.segments_of(stripe).filter_map(activity);
            let reads = segments.map(|activity| activity.reads()).sum();
            let reading =
                temperature.readings.entry(stripe).or_insert_with(|| Reading::new(reads, now));
            if reading.is_warm(reads, now, cold.after) {
                map.warm(stripe);
            }
        }
    }

    /// Works out the shards of a stripe that are to be filled. False if that cannot be done now.
    pub(crate) fn rebuild(&self, stripe: u64, pace: &Pace) -> Result<bool, SpaceError> {
        let rebuild = self.map().rebuild(stripe);
        let Some(rebuild) = rebuild else { return Ok(false) };
        let sources = rebuild.sources.iter().filter(|(.., place)| place.is_some()).count();
        let all: Vec<u32> = (0..self.segment_pages() as u32).collect();
        for pages in all.chunks(MAX_PAGES) {
            let Some(shards) = self.work_out(&rebuild, pages)? else { return Ok(false) };
            for (&(_, segment, to), data) in rebuild.targets.iter().zip(&shards) {
                if !self.write_shard(segment, to, pages, data)? {
                    return Ok(self.map().desert(segment, to));
                }
            }
            let moved = pages.len() * (sources + shards.len());
            pace.spent((moved * PAGE_SIZE) as u64);
        }
        for &(_, segment, to) in &rebuild.targets {
            if !self.confirm(segment, to)? {
                return Ok(false);
            }
            let donor = &self.donor(to.donor).name;
            info!(stripe, segment, donor, "a shard was worked out");
        }
        Ok(true)
    }

    /// Works out some pages of each target of a rebuild. None if that cannot be done now.
    fn work_out(
        &self,
        rebuild: &Rebuild,
        pages: &[u32],
    ) -> Result<Option<Vec<Vec<u8>>>, SpaceError> {
        let Some(code) = self.config().cold.map(|cold| cold.code) else { return Ok(None) };
        let wanted: Vec<usize> = rebuild.targets.iter().map(|(shard, ..)| *shard).collect();
        let mut shards: Vec<Option<Vec<u8>>> = vec![None; code.shards()];
        let mut damaged: BTreeSet<u32> = BTreeSet::new();
        for &(shard, segment, place) in &rebuild.sources[..code.data()] {
            let Some(came) = self.read_shard(segment, place, pages)? else { return Ok(None) };
            if let Some(page) = came.damaged.first().filter(|_| rebuild.is_coding) {
                // There are copies to mend it from.
                self.map().give_up_coding(rebuild.stripe);
                self.suspect(segment * self.segment_pages() + u64::from(*page));
                return Ok(None);
            }
            damaged.extend(came.damaged);
            shards[shard] = Some(came.data);
        }
        if !code.coder().complete(&mut shards, &wanted) {
            return Ok(None);
        }
        let mut worked_out: Vec<Vec<u8>> =
            wanted.iter().filter_map(|shard| shards[*shard].take()).collect();
        for (at, page) in pages.iter().enumerate().filter(|(_, page)| damaged.contains(page)) {
            let Some(row) = self.work_out_row(rebuild, *page, &wanted)? else { return Ok(None) };
            let bytes = at * PAGE_SIZE..(at + 1) * PAGE_SIZE;
            for (data, row) in worked_out.iter_mut().zip(row) {
                data[bytes.clone()].copy_from_slice(&row);
            }
        }
        Ok(Some(worked_out))
    }

    /// Works out one page of each target, from whichever sources have it sound. If they are too
    /// few, the page is lost, and zeros stand for it: whoever reads it knows another sum.
    fn work_out_row(
        &self,
        rebuild: &Rebuild,
        page: u32,
        wanted: &[usize],
    ) -> Result<Option<Vec<Vec<u8>>>, SpaceError> {
        let Some(code) = self.config().cold.map(|cold| cold.code) else { return Ok(None) };
        let mut shards: Vec<Option<Vec<u8>>> = vec![None; code.shards()];
        for &(shard, segment, place) in &rebuild.sources {
            let Some(came) = self.read_shard(segment, place, &[page])? else { return Ok(None) };
            shards[shard] = came.damaged.is_empty().then_some(came.data);
        }
        if code.coder().complete(&mut shards, wanted) {
            return Ok(Some(wanted.iter().filter_map(|shard| shards[*shard].take()).collect()));
        }
        error!(stripe = rebuild.stripe, page, "pages have gone bad in too many shards");
        Ok(Some(vec![vec![0; PAGE_SIZE]; wanted.len()]))
    }

    /// Pages of a shard; zeros if it is nowhere. None if its donor does not have it any more.
    fn read_shard(
        &self,
        segment: u64,
        place: Option<Place>,
        pages: &[u32],
    ) -> Result<Option<ShardPages>, SpaceError> {
        let Some(place) = place else {
            let data = vec![0; pages.len() * PAGE_SIZE];
            return Ok(Some(ShardPages { data, damaged: Vec::new() }));
        };
        let request = Request::Read { extent: place.extent, pages };
        let (sums, data) = match self.ask_member(segment, place, request)? {
            Outcome::Pages { sums, data } => (sums, data),
            Outcome::Refused(Refusal::NoSuchExtent) => {
                self.map().gone(segment, place);
                return Ok(None);
            }
            outcome => return Err(self.odd(&self.donor(place.donor), outcome)),
        };
        let record = self.record.get().filter(|_| !code::is_parity(segment));
        let mut damaged = Vec::new();
        for ((&page, data), sum) in pages.iter().zip(data.chunks(PAGE_SIZE)).zip(sums) {
            let number = segment.wrapping_mul(self.segment_pages()) + u64::from(page);
            let known = record.and_then(|record| record.sum_of(number));
            if page_sum(data) != sum || known.is_some_and(|known| known != sum) {
                warn!(segment, page, "a page has gone bad in a donor's memory");
                damaged.push(page);
            }
        }
        Ok(Some(ShardPages { data, damaged }))
    }

    /// Writes pages of a shard, but for those that are zeros. False if its donor does not have the
    /// extent any more.
    fn write_shard(
        &self,
        segment: u64,
        to: Place,
        pages: &[u32],
        data: &[u8],
    ) -> Result<bool, SpaceError> {
        let contents = pages.iter().zip(data.chunks(PAGE_SIZE));
        let (pages, data): (Vec<u32>, Vec<&[u8]>) =
            contents.filter(|(_, data)| !is_zero(data)).unzip();
        if pages.is_empty() {
            return Ok(true);
        }
        let sums: Vec<PageSum> = data.iter().map(|page| page_sum(page)).collect();
        // It stays one that is being filled.
        let generation = hecaton_memory::Generation::FILLING;
        let request = Request::Write { extent: to.extent, generation, pages: &pages, sums: &sums };
        match self.ask_member_with(segment, to, request, &data)? {
            Outcome::Done => Ok(true),
            Outcome::Refused(Refusal::NoSuchExtent) => Ok(false),
            outcome => Err(self.odd(&self.donor(to.donor), outcome)),
        }
    }

    /// All parities of a stripe are made: it is coded from here on, unless it is being written.
    pub(crate) fn commit(&self, stripe: u64) -> Result<bool, SpaceError> {
        let Some(record) = self.record.get() else { return Ok(false) };
        let ready = self.map().ready_to_commit(stripe);
        let Some((generation, keepers)) = ready else { return Ok(false) };
        for (segment, keeper) in keepers {
            let request = Request::Confirm { extent: keeper.extent, generation };
            match self.ask_member(segment, keeper, request)? {
                Outcome::Done => {}
                Outcome::Refused(Refusal::NoSuchExtent) => {
                    self.map().gone(segment, keeper);
                    return Ok(false);
                }
                outcome => return Err(self.odd(&self.donor(keeper.donor), outcome)),
            }
        }
        let Some(coded) = self.map().commit(stripe, generation) else { return Ok(false) };
        record.note(stripe, Some(coded));
        self.map().recorded(stripe);
        info!(stripe, "cold memory was coded");
        Ok(true)
    }

    /// A stripe has copies again, and may be written, if all of them are there. A copy that has
    /// gone unheard is worked out once more: only the parities can do that, and they go with this.
    pub(crate) fn thaw(&self, stripe: u64) -> Result<bool, SpaceError> {
        let Some(record) = self.record.get() else { return Ok(false) };
        if self.map().ready_to_thaw(stripe).is_none() {
            return Ok(false);
        }
        self.mend_before_thaw(stripe, &|page| record.sum_of(page));
        // From here on pages of the stripe are not mended: what is written afterwards would be
        // undone.
        let _no_mending = self.mending.lock().unwrap_or_else(PoisonError::into_inner);
        let ready = self.map().ready_to_thaw(stripe);
        let Some(copies) = ready else { return Ok(false) };
        for &(segment, place) in &copies {
            if !self.is_there(segment, place)? {
                self.map().gone(segment, place);
                return Ok(false);
            }
        }
        if self.map().ready_to_thaw(stripe) != Some(copies) {
            return Ok(false);
        }
        record.note(stripe, None);
        self.map().thaw(stripe);
        info!(stripe, "cold memory is kept in copies again");
        Ok(true)
    }
}
