//! Has the copies of the consumer's pages compared, in the background, over and over.
//!
//! What a page must be is known here, by its record: the sum that it was written with, once donors have
//! acknowledged it; unless pages leave sealed. Then donors' pages are compared with the sums that the donors
//! keep, and no more: one that was altered together with its sum is found when it is read. (See
//! [`hecaton_space::scrub`] for what is done about copies that differ.)

use crate::state::record::Record;
use hecaton_memory::PageSum;
use hecaton_space::Space;
use std::sync::atomic::{AtomicU64, Ordering::Acquire};
use std::time::{Duration, Instant};

/// Between two rounds, however little there is to compare.
const BETWEEN_ROUNDS: Duration = Duration::from_secs(1);

/// How soon pages are looked at that came back wrong.
const TICK: Duration = Duration::from_millis(100);

/// Runs as long as the process. Donors read so many bytes a second for it at most, all of them
/// together, but for a few MiB; with 0 only what came back wrong is compared.
pub(crate) fn run(space: &Space, records: Option<&[AtomicU64]>, bytes_per_s: u64) {
    let known = |page| stored(records?, page);
    let mut due = Instant::now();
    loop {
        space.scrub_suspects(&known);
        let now = Instant::now();
        if bytes_per_s > 0 && due <= now {
            due = now
                + match space.scrub(&known) {
                    Some(bytes) => Duration::from_secs_f64(bytes as f64 / bytes_per_s as f64),
                    None => BETWEEN_ROUNDS,
                };
        }
        let wait = due.saturating_duration_since(Instant::now());
        std::thread::sleep(if bytes_per_s > 0 { wait.min(TICK) } else { TICK });
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
