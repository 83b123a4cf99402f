//! Gives the checksum that all copies of a page must have.
//!
//! [`hecaton_space::Space::keep_scrubbed`] compares with it. The page's record holds the sum of the
//! sent bytes once donors have acknowledged them; for a sealed page, of the ciphertext. That sum
//! takes no extra room: the tag checks a page that comes back sealed, so the plaintext needs no
//! sum. [`hecaton_space::scrub`] handles copies that differ.

use crate::state::record::Record;
use hecaton_memory::PageSum;
use std::sync::atomic::{AtomicU64, Ordering::Acquire};

/// The sum of the page that donors hold. A space page is written once each time it is allocated, so
/// no other write to it is in flight.
pub(crate) fn stored(records: &[AtomicU64], page: u64) -> Option<PageSum> {
    let record = Record(records.get(page as usize)?.load(Acquire));
    (record.refs() > 0 && record.is_stored()).then(|| record.sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_donors_have_acknowledged_is_certain() {
        let page = |record: Record| [AtomicU64::new(record.0)];
        let named = Record::FREE.with_refs(2).with_sum(7);
        assert_eq!(stored(&page(named.with_stored(true)), 0), Some(7));
        assert_eq!(stored(&page(named.with_slot(Some(3))), 0), None, "on its way");
        assert_eq!(stored(&page(named.with_stored(true).with_refs(0)), 0), None, "nobody's");
        assert_eq!(stored(&page(named), 1), None, "beyond the end");
    }
}
