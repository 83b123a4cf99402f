//! Where each segment is, for readers that must not wait.
//!
//! The map behind its mutex is the truth; this is its shadow for the fault path. Every entry is a
//! sequence lock: the writer makes the count odd, changes the fields, makes it even again; a reader
//! that saw an odd count, or two different ones, reads again. Writers are serialised by the map's
//! mutex. There are few of them, one for each extent taken or given back.

use crate::group::{DonorIndex, Group, MAX_MEMBERS, Place};
use hecaton_memory::{ExtentId, Generation};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

/// What a reader needs to know of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whereabouts {
    /// Nothing was ever written: its pages are zeros.
    Nowhere,
    /// Extents hold it.
    Held(Group),
    /// Its last copy was with this donor and is gone.
    Lost(DonorIndex),
}

const NOWHERE: u32 = 0;
const HELD: u32 = 1;
const LOST: u32 = 2;

#[derive(Default)]
struct Entry {
    sequence: AtomicU32,
    state: AtomicU32,
    generation: AtomicU64,
    members: [EntryMember; MAX_MEMBERS],
}

#[derive(Default)]
struct EntryMember {
    /// [`NO_MEMBER`], [`FILLING`] or [`WHOLE`].
    standing: AtomicU32,
    donor: AtomicU32,
    boot: AtomicU64,
    extent: AtomicU64,
}

const NO_MEMBER: u32 = 0;
const FILLING: u32 = 1;
const WHOLE: u32 = 2;

/// Entries that come into being together, with the first of them that is set.
const CHUNK: u64 = 1024;

/// Where each segment of a space is.
pub struct Lookup {
    segments: u64,
    chunks: Box<[OnceLock<Box<[Entry]>>]>,
}

impl Lookup {
    /// Segments that are all nowhere.
    pub fn new(segments: u64) -> Lookup {
        let chunks = (0..segments.div_ceil(CHUNK)).map(|_| OnceLock::new()).collect();
        Lookup { segments, chunks }
    }

    /// Where a segment is.
    ///
    /// # Panics
    /// If there is no such segment.
    pub fn get(&self, segment: u64) -> Whereabouts {
        assert!(segment < self.segments, "segment {segment} of {}", self.segments);
        match self.chunks[(segment / CHUNK) as usize].get() {
            Some(entries) => entries[(segment % CHUNK) as usize].get(),
            None => Whereabouts::Nowhere,
        }
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
            let lost_with = DonorIndex(self.members[0].donor.load(Ordering::Relaxed));
            let mut group = Group::new(Generation(self.generation.load(Ordering::Relaxed)));
            // What is read while the entry changes may be half of each, two members at one donor
            // among it; it is thrown away below.
            let mut is_sound = true;
            for member in &self.members {
                let standing = member.standing.load(Ordering::Relaxed);
                if state != HELD || standing == NO_MEMBER {
                    break;
                }
                let place = Place {
                    donor: DonorIndex(member.donor.load(Ordering::Relaxed)),
                    boot: member.boot.load(Ordering::Relaxed),
                    extent: ExtentId(member.extent.load(Ordering::Relaxed)),
                };
                is_sound &= group.at(place.donor).is_none();
                if is_sound {
                    group.add(place, standing == WHOLE);
                }
            }
            // Keeps the loads above from moving behind the second look at the count.
            fence(Ordering::Acquire);
            if before.is_multiple_of(2) && self.sequence.load(Ordering::Relaxed) == before {
                debug_assert!(is_sound);
                return match state {
                    HELD => Whereabouts::Held(group),
                    LOST => Whereabouts::Lost(lost_with),
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
        let state = match whereabouts {
            Whereabouts::Nowhere => NOWHERE,
            Whereabouts::Held(group) => {
                self.generation.store(group.generation.0, Ordering::Relaxed);
                for (at, entry) in self.members.iter().enumerate() {
                    match group.members().get(at) {
                        Some(member) => {
                            let standing = if member.is_whole { WHOLE } else { FILLING };
                            entry.standing.store(standing, Ordering::Relaxed);
                            entry.donor.store(member.place.donor.0, Ordering::Relaxed);
                            entry.boot.store(member.place.boot, Ordering::Relaxed);
                            entry.extent.store(member.place.extent.0, Ordering::Relaxed);
                        }
                        None => entry.standing.store(NO_MEMBER, Ordering::Relaxed),
                    }
                }
                HELD
            }
            Whereabouts::Lost(donor) => {
                self.members[0].donor.store(donor.0, Ordering::Relaxed);
                LOST
            }
        };
        self.state.store(state, Ordering::Relaxed);
        self.sequence.store(before.wrapping_add(2), Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    fn group(turn: u64) -> Group {
        let mut group = Group::new(Generation(turn));
        for member in 0..1 + turn % MAX_MEMBERS as u64 {
            let donor = DonorIndex((turn + member) as u32);
            group.add(Place { donor, boot: turn, extent: ExtentId(turn) }, member % 2 == 0);
        }
        group
    }

    #[test]
    fn a_reader_never_sees_half_of_an_entry() {
        let lookup = Lookup::new(2);
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for turn in 1..200_000u64 {
                    lookup.set(1, Whereabouts::Held(group(turn)));
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
                    Whereabouts::Held(seen) => {
                        assert_eq!(seen, group(seen.generation.0));
                        assert!(seen.generation.0 >= latest, "went back in time");
                        seen.generation.0
                    }
                };
            }
        });
        assert_eq!(lookup.get(0), Whereabouts::Nowhere);
    }
}
