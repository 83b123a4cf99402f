//! Where each segment is, for readers that must not wait.
//!
//! The map behind its mutex is the truth; this is its shadow for the fault path. Every entry is a
//! sequence lock: the writer makes the count odd, changes the fields, makes it even again; a reader
//! that saw an odd count, or two different ones, reads again. Writers are serialised by the map's
//! mutex. There are few of them, one for each extent taken or given back.

use crate::coded::code::FIRST_PARITY;
use crate::map::group::{DonorIndex, Form, Group, MAX_MEMBERS, Place};
use hecaton_memory::{ExtentId, Generation};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::time::Duration;

/// Where a segment is, as a reader sees it.
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

const COPIES: u32 = 0;
const CODING: u32 = 1;
const CODED: u32 = 2;

#[derive(Default)]
struct Entry {
    sequence: AtomicU32,
    state: AtomicU32,
    form: AtomicU32,
    generation: AtomicU64,
    members: [EntryMember; MAX_MEMBERS],
    activity: Activity,
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

/// Where each segment of a space is, and each parity.
pub struct Lookup {
    segments: Table,
    parities: Table,
}

struct Table {
    count: u64,
    chunks: Box<[OnceLock<Box<[Entry]>>]>,
}

impl Lookup {
    /// Segments, and parities of some of them, that are all nowhere.
    pub fn new(segments: u64, parities: u64) -> Lookup {
        Lookup { segments: Table::new(segments), parities: Table::new(parities) }
    }

    /// Where a segment is.
    ///
    /// # Panics
    /// If there is no such segment.
    pub fn get(&self, segment: u64) -> Whereabouts {
        let (table, at) = self.table_of(segment);
        table.known(at).map_or(Whereabouts::Nowhere, Entry::get)
    }

    /// Sets where a segment is. Callers hold the map's mutex.
    pub fn set(&self, segment: u64, whereabouts: Whereabouts) {
        let (table, at) = self.table_of(segment);
        table.entry(at).set(whereabouts);
    }

    /// Use counters of a segment.
    pub fn activity(&self, segment: u64) -> &Activity {
        let (table, at) = self.table_of(segment);
        &table.entry(at).activity
    }

    /// Use counters of a segment, if its entry exists.
    pub fn known_activity(&self, segment: u64) -> Option<&Activity> {
        let (table, at) = self.table_of(segment);
        table.known(at).map(|entry| &entry.activity)
    }

    fn table_of(&self, segment: u64) -> (&Table, u64) {
        match segment.checked_sub(FIRST_PARITY) {
            None => (&self.segments, segment),
            Some(parity) => (&self.parities, parity),
        }
    }
}

impl Table {
    fn new(count: u64) -> Table {
        Table { count, chunks: (0..count.div_ceil(CHUNK)).map(|_| OnceLock::new()).collect() }
    }

    fn known(&self, at: u64) -> Option<&Entry> {
        assert!(at < self.count, "segment {at} of {}", self.count);
        let entries = self.chunks[(at / CHUNK) as usize].get()?;
        Some(&entries[(at % CHUNK) as usize])
    }

    fn entry(&self, at: u64) -> &Entry {
        assert!(at < self.count, "segment {at} of {}", self.count);
        let entries = self.chunks[(at / CHUNK) as usize]
            .get_or_init(|| (0..CHUNK).map(|_| Entry::default()).collect());
        &entries[(at % CHUNK) as usize]
    }
}

/// Use counters of a segment, in a space that codes cold segments.
#[derive(Debug, Default)]
pub struct Activity {
    /// Writes and discards that may still land.
    writes: AtomicU32,
    /// When it was used last, in tenths of a second of the space's clock.
    used: AtomicU32,
    reads: AtomicU32,
}

impl Activity {
    /// A write begins. To be called before the segment's whereabouts are looked at.
    pub fn write_begins(&self, now: Duration) {
        self.writes.fetch_add(1, Ordering::Relaxed);
        self.used.store(tenths(now), Ordering::Relaxed);
        // With the one below: either the write is seen there, or the writer sees that the stripe is
        // coding.
        fence(Ordering::SeqCst);
    }

    /// Nothing of a write lands any more.
    pub fn write_ends(&self) {
        self.writes.fetch_sub(1, Ordering::Release);
    }

    /// Whether writes are under way. To be asked after it was published that the stripe is coding.
    pub fn is_written(&self) -> bool {
        fence(Ordering::SeqCst);
        self.writes.load(Ordering::Acquire) > 0
    }

    /// It is read.
    pub fn read(&self, now: Duration) {
        self.used.store(tenths(now), Ordering::Relaxed);
        self.reads.fetch_add(1, Ordering::Relaxed);
    }

    /// How long nobody has used it.
    pub fn idle(&self, now: Duration) -> Duration {
        let tenths = tenths(now).saturating_sub(self.used.load(Ordering::Relaxed));
        Duration::from_millis(u64::from(tenths) * 100)
    }

    /// Read requests so far. The count begins anew after 2^32.
    pub fn reads(&self) -> u64 {
        self.reads.load(Ordering::Relaxed).into()
    }
}

fn tenths(now: Duration) -> u32 {
    (now.as_millis() / 100).min(u32::MAX.into()) as u32
}

impl Entry {
    fn get(&self) -> Whereabouts {
        loop {
            let before = self.sequence.load(Ordering::Acquire);
            let state = self.state.load(Ordering::Relaxed);
            let lost_with = DonorIndex(self.members[0].donor.load(Ordering::Relaxed));
            let mut group = Group::new(Generation(self.generation.load(Ordering::Relaxed)));
            group.form = match self.form.load(Ordering::Relaxed) {
                CODED => Form::Coded,
                CODING => Form::Coding,
                _ => Form::Copies,
            };
            // An entry that changes meanwhile may read as half of each version, even with two
            // members at one donor. The check below discards such a result.
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
                let form = match group.form {
                    Form::Copies => COPIES,
                    Form::Coding => CODING,
                    Form::Coded => CODED,
                };
                self.form.store(form, Ordering::Relaxed);
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
        let lookup = Lookup::new(2, 0);
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
