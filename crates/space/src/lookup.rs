//! Where each segment is, for readers that must not wait.
//!
//! The map behind its mutex is the truth; this is its shadow for the fault path. Every entry is a
//! sequence lock: the writer makes the count odd, changes the fields, makes it even again; a reader
//! that saw an odd count, or two different ones, reads again. Writers are serialised by the map's
//! mutex. There are few of them, one for each extent taken or given back.

use crate::map::{DonorIndex, Place};
use hecaton_memory::ExtentId;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

/// What a reader needs to know of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whereabouts {
    /// Nothing was ever written: its pages are zeros.
    Nowhere,
    /// An extent holds it.
    Held(Place),
    /// Its only copy was with this donor and is gone.
    Lost(DonorIndex),
}

const NOWHERE: u32 = 0;
const HELD: u32 = 1;
const LOST: u32 = 2;

#[derive(Default)]
struct Entry {
    sequence: AtomicU32,
    state: AtomicU32,
    donor: AtomicU32,
    boot: AtomicU64,
    extent: AtomicU64,
}

/// Entries that come into being together, with the first of them that is set.
const CHUNK: u64 = 1024;

/// Where each segment of a space is.
pub struct Lookup {
    segments: u64,
    chunks: Box<[OnceLock<Box<[Entry]>>]>,
    /// One more than the donor that may hold any segment that seems to be nowhere; zero if there is
    /// no such donor.
    unlisted: AtomicU32,
}

impl Lookup {
    /// Segments that are all nowhere.
    pub fn new(segments: u64) -> Lookup {
        let chunks = (0..segments.div_ceil(CHUNK)).map(|_| OnceLock::new()).collect();
        Lookup { segments, chunks, unlisted: AtomicU32::new(0) }
    }

    /// Where a segment is.
    ///
    /// # Panics
    /// If there is no such segment.
    pub fn get(&self, segment: u64) -> Whereabouts {
        assert!(segment < self.segments, "segment {segment} of {}", self.segments);
        match self.chunks[(segment / CHUNK) as usize].get() {
            Some(entries) => match entries[(segment % CHUNK) as usize].get() {
                Whereabouts::Nowhere => self.nowhere(),
                known => known,
            },
            None => self.nowhere(),
        }
    }

    fn nowhere(&self) -> Whereabouts {
        match self.unlisted.load(Ordering::Acquire) {
            0 => Whereabouts::Nowhere,
            donor => Whereabouts::Lost(DonorIndex(donor - 1)),
        }
    }

    /// Says which donor may hold any segment that seems to be nowhere. Callers hold the map's mutex.
    pub fn set_unlisted(&self, donor: Option<DonorIndex>) {
        self.unlisted.store(donor.map_or(0, |donor| donor.0 + 1), Ordering::Release);
    }

    /// Sets where a segment is. Callers hold the map's mutex.
    pub fn set(&self, segment: u64, whereabouts: Whereabouts) {
        assert!(segment < self.segments, "segment {segment} of {}", self.segments);
        let entries = self.chunks[(segment / CHUNK) as usize]
            .get_or_init(|| (0..CHUNK).map(|_| Entry::default()).collect());
        entries[(segment % CHUNK) as usize].set(whereabouts);
    }
}

impl Entry {
    fn get(&self) -> Whereabouts {
        loop {
            let before = self.sequence.load(Ordering::Acquire);
            let state = self.state.load(Ordering::Relaxed);
            let donor = DonorIndex(self.donor.load(Ordering::Relaxed));
            let boot = self.boot.load(Ordering::Relaxed);
            let extent = ExtentId(self.extent.load(Ordering::Relaxed));
            // Keeps the loads above from moving behind the second look at the count.
            fence(Ordering::Acquire);
            if before.is_multiple_of(2) && self.sequence.load(Ordering::Relaxed) == before {
                return match state {
                    HELD => Whereabouts::Held(Place { donor, boot, extent }),
                    LOST => Whereabouts::Lost(donor),
                    _ => Whereabouts::Nowhere,
                };
            }
            std::hint::spin_loop();
        }
    }

    fn set(&self, whereabouts: Whereabouts) {
        let before = self.sequence.load(Ordering::Relaxed);
        self.sequence.store(before.wrapping_add(1), Ordering::Relaxed);
        // Keeps the stores below from moving before the odd count.
        fence(Ordering::Release);
        let (state, donor, boot, extent) = match whereabouts {
            Whereabouts::Nowhere => (NOWHERE, 0, 0, 0),
            Whereabouts::Held(place) => (HELD, place.donor.0, place.boot, place.extent.0),
            Whereabouts::Lost(donor) => (LOST, donor.0, 0, 0),
        };
        self.state.store(state, Ordering::Relaxed);
        self.donor.store(donor, Ordering::Relaxed);
        self.boot.store(boot, Ordering::Relaxed);
        self.extent.store(extent, Ordering::Relaxed);
        self.sequence.store(before.wrapping_add(2), Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    #[test]
    fn a_reader_never_sees_half_of_an_entry() {
        let lookup = Lookup::new(2);
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for turn in 1..200_000u64 {
                    let place = Place {
                        donor: DonorIndex(turn as u32),
                        boot: turn,
                        extent: ExtentId(turn),
                    };
                    lookup.set(1, Whereabouts::Held(place));
                    if turn % 3 == 0 {
                        lookup.set(1, Whereabouts::Lost(DonorIndex(turn as u32)));
                    }
                }
                done.store(true, Ordering::Release);
            });
            let mut latest = 0;
            while !done.load(Ordering::Acquire) {
                latest = match lookup.get(1) {
                    Whereabouts::Nowhere => continue,
                    Whereabouts::Lost(donor) => u64::from(donor.0),
                    Whereabouts::Held(place) => {
                        assert_eq!(place.boot, place.extent.0);
                        assert_eq!(place.boot, u64::from(place.donor.0));
                        assert!(place.boot >= latest, "went back in time");
                        place.boot
                    }
                };
            }
        });
        assert_eq!(lookup.get(0), Whereabouts::Nowhere);
        lookup.set_unlisted(Some(DonorIndex(4)));
        assert_eq!(lookup.get(0), Whereabouts::Lost(DonorIndex(4)));
    }
}
