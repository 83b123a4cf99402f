//! What the copies of the consumer's pages must be, for [`hecaton_space::Space::keep_scrubbed`].
//!
//! That is known by a page's record: the sum of what was sent, once donors have acknowledged it. Of
//! a page that leaves sealed that is the sum of the ciphertext, which takes no room of its own:
//! what comes back sealed is checked by its tag, so that nobody asks for the sum of what was
//! sealed. (See [`hecaton_space::scrub`] for what is done about copies that differ.)

use crate::state::record::Record;
use hecaton_memory::PageSum;
use std::sync::atomic::{AtomicU64, Ordering::Acquire};

/// The sum of what donors have of a page. A space page is written once between two times that it is
/// given out, so that nothing else is on its way there.
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
