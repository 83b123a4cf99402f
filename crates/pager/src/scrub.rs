//! Has the copies of the consumer's pages compared, in the background, over and over.
//!
//! What a page must be is known here, by its record: the sum that it was written with, once donors have
//! acknowledged it. (See [`hecaton_space::scrub`] for what is done about copies that differ.)

use crate::state::record::Record;
use hecaton_memory::PageSum;
use hecaton_space::Space;
use std::sync::atomic::{AtomicU64, Ordering::Acquire};
use std::time::Duration;

/// Between two rounds, however little there is to compare.
const BETWEEN_ROUNDS: Duration = Duration::from_secs(1);

/// Runs as long as the process. Donors read so many bytes a second for it at most, all of them
/// together, but for a few MiB.
pub(crate) fn run(space: &Space, records: &[AtomicU64], bytes_per_s: u64) {
    loop {
        let pause = match space.scrub(&|page| stored(records, page)) {
            Some(bytes) => Duration::from_secs_f64(bytes as f64 / bytes_per_s as f64),
            None => BETWEEN_ROUNDS,
        };
        std::thread::sleep(pause);
    }
}

/// The sum of what donors have of a page. A space page is written once between two times that it is
/// given out, so that nothing else is on its way there.
fn stored(records: &[AtomicU64], page: u64) -> Option<PageSum> {
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
