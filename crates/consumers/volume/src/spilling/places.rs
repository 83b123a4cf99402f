//! Where the segments of a volume with a spill file are.
//!
//! A segment that was never written is nowhere. The first write decides whether the pool has room
//! for it. It keeps its place until all of it is dropped, [`crate::spilling::returns`] brings it
//! back to the pool, or [`crate::spilling::departures`] takes it out of there. A request that looks
//! up the place of a segment holds locks of pages in it. The place changes only while locks keep
//! writers out. So no request writes to one place while another one looks at the other.

use crate::state::{MAX_SEGMENTS, Page, SEGMENT_PAGES, State, pages_of_segment};
use hecaton_memory::pages_to_bytes;
use hecaton_space::{Space, SpaceError};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU8, AtomicU32};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Where a segment is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// Nothing is written in it.
    Nowhere,
    /// At donors.
    Pool,
    /// In the spill file.
    Spill,
}

/// The places of all segments.
#[derive(Debug)]
pub(crate) struct Places {
    places: Vec<AtomicU8>,
    /// Seconds from `opened` till each segment was used last.
    used: Vec<AtomicU32>,
    opened: Instant,
    counts: Mutex<Counts>,
    /// Held by who decides: two that write to different pages of a segment decide once.
    deciding: Mutex<()>,
    /// Most segments in the pool.
    most_in_pool: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    in_pool: u64,
    spilled: u64,
    /// Those for which room in the pool is being looked for.
    taking: u64,
}

impl Places {
    /// As a predecessor has left them. All copies together take `limit` bytes of the pool at most.
    pub(crate) fn new(state: &State, copies: u8, limit: Option<u64>) -> Places {
        let bytes = pages_to_bytes(SEGMENT_PAGES) * u64::from(copies);
        let places = Places {
            places: (0..MAX_SEGMENTS).map(|_| AtomicU8::new(0)).collect(),
            used: (0..MAX_SEGMENTS).map(|_| AtomicU32::new(0)).collect(),
            opened: Instant::now(),
            counts: Mutex::default(),
            deciding: Mutex::default(),
            most_in_pool: limit.map_or(u64::MAX, |limit| limit / bytes),
        };
        let is_used =
            |segment| pages_of_segment(segment).any(|page| state.page(page) != Page::Hole);
        for segment in 0..state.pages().div_ceil(SEGMENT_PAGES) {
            if state.is_spilled(segment) {
                // The segment was on its way: its extents at donors are not used any more.
                state.freed(segment);
                places.set(segment, Place::Spill);
            } else if is_used(segment) {
                places.set(segment, Place::Pool);
            }
        }
        places
    }

    pub(crate) fn get(&self, segment: u64) -> Place {
        match self.places[segment as usize].load(Acquire) {
            0 => Place::Nowhere,
            1 => Place::Pool,
            _ => Place::Spill,
        }
    }

    /// Notes where a segment is from now on.
    pub(crate) fn set(&self, segment: u64, place: Place) {
        let mut counts = self.counts();
        match self.get(segment) {
            Place::Nowhere => {}
            Place::Pool => counts.in_pool -= 1,
            Place::Spill => counts.spilled -= 1,
        }
        match place {
            Place::Nowhere => {}
            Place::Pool => counts.in_pool += 1,
            Place::Spill => counts.spilled += 1,
        }
        self.places[segment as usize].store(place as u8, Release);
    }

    /// Whether the volume's own limit lets it have a further segment in the pool; if so,
    /// [`Places::taken`] is called when it has it, or has not got it.
    pub(crate) fn may_take(&self) -> bool {
        let mut counts = self.counts();
        let may = counts.in_pool + counts.taking < self.most_in_pool;
        counts.taking += u64::from(may);
        may
    }

    /// Whether it has all that its own limit lets it have.
    pub(crate) fn is_at_limit(&self) -> bool {
        let counts = self.counts();
        counts.in_pool + counts.taking >= self.most_in_pool
    }

    /// Somebody reads or writes there.
    pub(crate) fn touch(&self, segment: u64) {
        self.used[segment as usize].store(self.now_s(), Relaxed);
    }

    /// The segments in the pool that were not used for so long, those first that were not for
    /// longest.
    pub(crate) fn idle(&self, idle: Duration) -> Vec<u64> {
        let now = self.now_s();
        let used = |segment: &u64| self.used[*segment as usize].load(Relaxed);
        let is_idle = |segment: &u64| u64::from(now - used(segment).min(now)) >= idle.as_secs();
        let in_pool = (0..MAX_SEGMENTS).filter(|segment| self.get(*segment) == Place::Pool);
        let mut segments: Vec<u64> = in_pool.filter(is_idle).collect();
        segments.sort_by_key(used);
        segments
    }

    fn now_s(&self) -> u32 {
        u32::try_from(self.opened.elapsed().as_secs()).unwrap_or(u32::MAX)
    }

    pub(crate) fn taken(&self) {
        self.counts().taking -= 1;
    }

    /// The segments in the spill file, in order.
    pub(crate) fn spilled(&self) -> Vec<u64> {
        if self.counts().spilled == 0 {
            return Vec::new();
        }
        (0..MAX_SEGMENTS).filter(|segment| self.get(*segment) == Place::Spill).collect()
    }

    /// Decides where a segment is to be that is nowhere, and tells where it is. `has_room` says
    /// whether the volume's target lets it have more in the pool.
    pub(crate) fn decide(
        &self,
        segment: u64,
        state: &State,
        space: &Space,
        has_room: impl FnOnce() -> bool,
    ) -> Result<Place, SpaceError> {
        if self.get(segment) != Place::Nowhere {
            return Ok(self.get(segment));
        }
        let _turn = self.deciding.lock().expect("no thread panics as it decides");
        if self.get(segment) != Place::Nowhere {
            return Ok(self.get(segment));
        }
        let may = has_room() && self.may_take();
        let place = match may {
            false => Ok(Place::Spill),
            true => match space.hold(segment) {
                Ok(()) => Ok(Place::Pool),
                Err(SpaceError::NoRoom { .. }) => Ok(Place::Spill),
                Err(error) => Err(error),
            },
        };
        if let Ok(place) = place {
            state.set_spilled(segment, place == Place::Spill);
            self.set(segment, place);
        }
        if may {
            self.taken();
        }
        place
    }

    fn counts(&self) -> MutexGuard<'_, Counts> {
        self.counts.lock().expect("no thread panics with the counts")
    }
}
