//! Keeps a record of stripes that are coded because they have gone cold.
//! The space writes it, and a successor reads it (see [`hecaton_space::stripe`]).

use crate::pool::scrub::stored;
use hecaton_memory::{Generation, PageSum};
use hecaton_space::{Code, Coded, Record};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{
    AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
};

/// The record of coded stripes, in the state file.
pub(crate) struct CodeRecord {
    /// [`State::codes`](crate::state::State::codes).
    pub(crate) codes: &'static [AtomicU64],
    /// The pages' records.
    pub(crate) records: &'static [AtomicU64],
}

impl Record for CodeRecord {
    fn note(&self, stripe: u64, coded: Option<Coded>) {
        let [generation, held] = &self.codes[2 * stripe as usize..][..2] else { return };
        match coded {
            // The generation is stored last: it says that the other word counts.
            Some(coded) => {
                held.store(coded.held.into(), Relaxed);
                generation.store(coded.generation.0, Release);
            }
            None => generation.store(0, Release),
        }
    }

    fn sum_of(&self, page: u64) -> Option<PageSum> {
        stored(self.records, page)
    }
}

/// Reads the codes of the stripes that contain these segments. A read of all stripes would take
/// memory for the whole table.
pub(crate) fn coded_stripes(
    codes: &[AtomicU64],
    code: Code,
    segments: impl Iterator<Item = u64>,
) -> BTreeMap<u64, Coded> {
    let stripes: BTreeSet<u64> = segments.map(|segment| code.shard_of(segment).0).collect();
    let noted = stripes.into_iter().filter_map(|stripe| {
        let [generation, held] = codes.get(2 * stripe as usize..)?.get(..2)? else { return None };
        let generation = Generation(generation.load(Acquire));
        let held = held.load(Relaxed) as u8;
        (generation.0 > 0).then_some((stripe, Coded { generation, held }))
    });
    noted.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_noted_is_found() {
        let codes: &'static [AtomicU64] =
            Box::leak((0..16).map(|_| AtomicU64::new(0)).collect::<Box<[_]>>());
        let record = CodeRecord { codes, records: &[] };
        let code = "4+2".parse().unwrap();
        let coded = Coded { generation: Generation(7), held: 0b1011 };
        record.note(2, Some(coded));
        record.note(3, Some(coded));
        record.note(3, None);
        let found = |segments: [u64; 2]| coded_stripes(codes, code, segments.into_iter());
        assert_eq!(found([9, 12]), BTreeMap::from([(2, coded)]));
        assert!(found([0, 7]).is_empty());
        assert_eq!(record.sum_of(3), None);
    }
}
