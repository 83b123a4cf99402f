//! Which donors back which part of a consumer's memory, and in how many copies.
//!
//! A machine's RAM lies in its space as it lies in the machine: byte *n* of its RAM is byte *n* of
//! the space, region after region in the order in which they were handed over. A range of RAM is so
//! a range of segments, and moving it to other donors is moving those. (A program's memory has no
//! such order: its pages get places in the space as they are evicted.)

use crate::state::SEGMENT_PAGES;
use hecaton_memory::{PAGE_SIZE, Size};
use hecaton_space::group::MAX_COPIES;
use hecaton_space::{Code, Space};
use serde::{Deserialize, Serialize};

/// Bytes of a segment: the unit of which ranges consist.
const SEGMENT_BYTES: u64 = SEGMENT_PAGES * PAGE_SIZE as u64;

/// Most ranges of one machine.
const MAX_RANGES: usize = 64;

/// Requirements of a consumer's owner for the consumer's memory in the pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Placement {
    /// Copies of each page, at different donors: 1 to 3.
    #[serde(default = "one")]
    pub copies: u8,
    /// The only donors that may be used, by name; all if there are none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub donors: Vec<String>,
    /// Donors for parts of a machine's RAM. They do not overlap.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ranges: Vec<RamRange>,
}

/// A part of a machine's RAM, and who backs it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RamRange {
    /// Its first byte; a multiple of 16 MiB.
    pub start: u64,
    /// The byte after its last one; a multiple of 16 MiB.
    pub end: u64,
    /// The donors, by name.
    pub donors: Vec<String>,
}

impl Default for Placement {
    fn default() -> Placement {
        Placement { copies: 1, donors: Vec::new(), ranges: Vec::new() }
    }
}

fn one() -> u8 {
    1
}

/// Why there can be no such placement.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlacementError {
    /// More copies than are kept, or none.
    #[error("{0} copies of each page cannot be kept: 1 to {MAX_COPIES} can")]
    Copies(u8),
    /// A range that is empty, or not of whole segments.
    #[error(
        "the range {start}-{end} of RAM cannot be: ranges begin and end at multiples of {unit}",
        start = Size(*.0), end = Size(*.1), unit = Size(SEGMENT_BYTES)
    )]
    Range(u64, u64),
    /// Two ranges with a part in common.
    #[error("two ranges of RAM overlap at {}", Size(*.0))]
    Overlap(u64),
    /// A range that nobody is to back.
    #[error("the range of RAM that begins at {} has no donor", Size(*.0))]
    Nobody(u64),
    /// More ranges than can be.
    #[error("{0} ranges of RAM are more than the {MAX_RANGES} that a machine may have")]
    TooMany(usize),
}

impl Placement {
    /// Whether it can be.
    pub fn check(&self) -> Result<(), PlacementError> {
        if !(1..=MAX_COPIES).contains(&self.copies) {
            return Err(PlacementError::Copies(self.copies));
        }
        if self.ranges.len() > MAX_RANGES {
            return Err(PlacementError::TooMany(self.ranges.len()));
        }
        let mut sorted: Vec<&RamRange> = self.ranges.iter().collect();
        sorted.sort_by_key(|range| range.start);
        for range in &sorted {
            let is_whole = |at: u64| at.is_multiple_of(SEGMENT_BYTES);
            if range.start >= range.end || !is_whole(range.start) || !is_whole(range.end) {
                return Err(PlacementError::Range(range.start, range.end));
            }
            if range.donors.is_empty() {
                return Err(PlacementError::Nobody(range.start));
            }
        }
        match sorted.windows(2).find(|pair| pair[1].start < pair[0].end) {
            Some(pair) => Err(PlacementError::Overlap(pair[1].start)),
            None => Ok(()),
        }
    }

    /// Puts it into force; what is elsewhere is moved. `before` was in force until then.
    pub(crate) fn apply(&self, space: &Space, before: &Placement) {
        let zones = self.ranges.iter().map(|range| range.donors.clone());
        space.set_zones([self.donors.clone()].into_iter().chain(zones).collect());
        let segments = |range: &RamRange| range.start / SEGMENT_BYTES..range.end / SEGMENT_BYTES;
        for segment in before.ranges.iter().flat_map(segments) {
            // Beyond the end of the space there is nothing to move.
            let _ = space.assign(segment, 0);
        }
        for (zone, range) in (1u16..).zip(&self.ranges) {
            for segment in segments(range) {
                let _ = space.assign(segment, zone);
            }
        }
    }

    /// How the pool holds the consumer's memory at this moment.
    pub(crate) fn in_use(&self, space: &Space) -> PoolUse {
        let status = space.status();
        let held_by = |zone: u16| {
            let donors = space.donors_of_zone(zone).into_iter();
            donors.map(|(name, extents)| (name, extents * SEGMENT_BYTES)).collect()
        };
        let ranges = (1u16..).zip(&self.ranges).map(|(zone, range)| RangeUse {
            start: range.start,
            end: range.end,
            donors: range.donors.clone(),
            held_by: held_by(zone),
        });
        let donors = status.donors.into_iter().map(|donor| DonorUse {
            bytes: donor.extents * SEGMENT_BYTES,
            name: donor.name,
            boot: donor.boot,
            reachable: donor.reachable,
            overdue: donor.overdue,
            draining: donor.draining,
            recalled_bytes: donor.recalled_bytes,
        });
        PoolUse {
            copies: self.copies,
            only_donors: self.donors.clone(),
            extents_bytes: status.segments_held * SEGMENT_BYTES,
            degraded_bytes: status.segments_degraded * SEGMENT_BYTES,
            to_move_bytes: status.segments_untended * SEGMENT_BYTES,
            lost_bytes: status.segments_lost * SEGMENT_BYTES,
            copied_bytes: status.bytes_filled,
            code: status.code,
            coded_bytes: status.segments_coded * SEGMENT_BYTES,
            saved_bytes: status.bytes_saved,
            scrub: ScrubUse {
                verified_bytes: status.scrub.bytes_verified,
                repaired_pages: status.scrub.pages_repaired,
                lost_pages: status.scrub.pages_lost,
                copies_given_up: status.scrub.copies_given_up,
                rounds: status.scrub.rounds,
            },
            donors: donors.filter(|donor| donor.bytes > 0).collect(),
            ranges: ranges.collect(),
        }
    }
}

/// How the pool holds a consumer's memory. Sizes are of extents, written or not.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolUse {
    /// Copies that each page is to have.
    pub copies: u8,
    /// The only donors that may be used; all if there are none.
    #[serde(default)]
    pub only_donors: Vec<String>,
    /// Memory that has extents, each counted once.
    pub extents_bytes: u64,
    /// The part of `extents_bytes` that has fewer copies than `copies`.
    pub degraded_bytes: u64,
    /// Memory of which copies wait to be made or moved, the degraded part included.
    pub to_move_bytes: u64,
    /// Memory whose last copy is gone.
    pub lost_bytes: u64,
    /// Bytes copied between donors so far, for new copies and moves.
    pub copied_bytes: u64,
    /// The erasure code of what has gone cold, if it is coded.
    #[serde(default)]
    pub code: Option<Code>,
    /// Memory that is coded.
    #[serde(default)]
    pub coded_bytes: u64,
    /// Bytes that coding saves: the extents of full copies, less the extents of shards and
    /// parities.
    #[serde(default)]
    pub saved_bytes: u64,
    /// Results of scrubbing.
    #[serde(default)]
    pub scrub: ScrubUse,
    /// The donors that hold some of it.
    pub donors: Vec<DonorUse>,
    /// Parts of a machine's RAM with donors of their own.
    #[serde(default)]
    pub ranges: Vec<RangeUse>,
}

/// Results of scrubbing a consumer's copies since the last start of its pager.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScrubUse {
    /// Bytes that donors have read for it, of all copies.
    pub verified_bytes: u64,
    /// Pages that had gone bad in one copy and were mended from another.
    pub repaired_pages: u64,
    /// Pages that no copy has as they were stored.
    pub lost_pages: u64,
    /// Copies of 16 MiB that were not what was stored, and are made anew.
    pub copies_given_up: u64,
    /// How many times all copies were compared.
    pub rounds: u64,
}

/// A donor, as one consumer uses it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DonorUse {
    /// The donor's name.
    pub name: String,
    /// Bytes of its extents.
    pub bytes: u64,
    /// The donor's life that was heard last, if any: a life begins without any extent.
    #[serde(default)]
    pub boot: Option<u64>,
    /// Whether it answered when it was last asked.
    pub reachable: bool,
    /// Whether requests have waited for it for so long that other copies serve in its place.
    #[serde(default)]
    pub overdue: bool,
    /// Whether it wants its memory back.
    pub draining: bool,
    /// Bytes of its extents that it wants back.
    #[serde(default)]
    pub recalled_bytes: u64,
}

/// A part of a machine's RAM, as it is backed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RangeUse {
    /// Its first byte.
    pub start: u64,
    /// The byte after its last one.
    pub end: u64,
    /// The donors that it is to be with.
    pub donors: Vec<String>,
    /// The donors that it is with, and bytes of their extents.
    pub held_by: std::collections::BTreeMap<String, u64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(start: u64, end: u64) -> RamRange {
        let donors = vec!["a".into()];
        RamRange { start: start * SEGMENT_BYTES, end: end * SEGMENT_BYTES, donors }
    }

    fn checked(ranges: Vec<RamRange>) -> Result<(), PlacementError> {
        Placement { ranges, ..Placement::default() }.check()
    }

    #[test]
    fn ranges_are_of_whole_segments_and_apart() {
        assert_eq!(checked(vec![range(4, 8), range(0, 4)]), Ok(()));
        let overlap = PlacementError::Overlap(3 * SEGMENT_BYTES);
        assert_eq!(checked(vec![range(3, 8), range(0, 4)]), Err(overlap));
        assert!(matches!(checked(vec![range(4, 4)]), Err(PlacementError::Range(..))));
        let odd = RamRange { end: SEGMENT_BYTES + 4096, ..range(0, 1) };
        let error = checked(vec![odd]).unwrap_err().to_string();
        assert!(error.contains("multiples of 16M"), "{error}");
        let nobody = RamRange { donors: Vec::new(), ..range(2, 3) };
        assert_eq!(checked(vec![nobody]), Err(PlacementError::Nobody(2 * SEGMENT_BYTES)));
    }

    #[test]
    fn there_are_one_to_three_copies() {
        for copies in 0..6 {
            let placement = Placement { copies, ..Placement::default() };
            assert_eq!(placement.check().is_ok(), (1..=3).contains(&copies));
        }
    }
}
