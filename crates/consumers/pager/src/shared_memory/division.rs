//! Divides local memory between a consumer's own pages and those of its files.
//!
//! Pure: limits and usage come in as arguments.

use hecaton_memory::PAGE_SIZE;

/// The least of each part: room for a few batches.
const MIN_PART_BYTES: u64 = 6 << 20;

/// One of the two parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    /// Bytes that may be local.
    pub(crate) limit: u64,
    /// Bytes that are local.
    pub(crate) used: u64,
    /// Pages fetched back since the last division.
    pub(crate) came_back: u64,
}

/// The part of files at first: a quarter of `total`, in bytes.
pub(crate) fn first(total: u64) -> u64 {
    within(total, total / 4)
}

/// Bytes that the part of files should have of `total`. The part to which clearly more pages come
/// back gets a sixteenth of all, or what the other part leaves unused of three quarters of its
/// limit.
pub(crate) fn divide(total: u64, own: Part, files: Part) -> u64 {
    // Smaller differences are not worth the evictions that a change costs.
    let noise = total / PAGE_SIZE as u64 / 256;
    let suffers = |one: Part, other: Part| one.came_back > other.came_back * 3 / 2 + noise;
    let spare = |part: Part| (part.limit / 4 * 3).saturating_sub(part.used);
    let amount = |from: Part| (total / 16).max(spare(from));
    let wanted = if suffers(files, own) {
        files.limit + amount(own)
    } else if suffers(own, files) {
        files.limit.saturating_sub(amount(files))
    } else {
        files.limit
    };
    within(total, wanted)
}

/// The limits of own pages and of files for now, if files are to have `wanted` bytes. Each part may
/// have what the other neither uses nor is to have, so both together keep to `total`.
pub(crate) fn for_now(total: u64, wanted: u64, own_used: u64, files_used: u64) -> (u64, u64) {
    let most = total.saturating_sub(MIN_PART_BYTES);
    let own = total - wanted.max(files_used).min(most);
    let files = total - (total - wanted).max(own_used).min(most);
    (own, files)
}

/// Whole pages, and at least [`MIN_PART_BYTES`] for each part.
fn within(total: u64, files: u64) -> u64 {
    let most = total.saturating_sub(MIN_PART_BYTES).max(MIN_PART_BYTES);
    files.clamp(MIN_PART_BYTES, most) / PAGE_SIZE as u64 * PAGE_SIZE as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn part(limit: u64, used: u64, came_back: u64) -> Part {
        Part { limit: limit * MIB, used: used * MIB, came_back }
    }

    #[test]
    fn unused_memory_goes_to_the_part_that_fetches_more() {
        assert_eq!(divide(64 * MIB, part(48, 10, 0), part(16, 16, 5000)), 42 * MIB);
        assert_eq!(divide(64 * MIB, part(48, 48, 5000), part(16, 4, 0)), 8 * MIB);
    }

    #[test]
    fn memory_moves_one_step_between_two_full_parts() {
        let files = |own, files| divide(64 * MIB, part(48, 48, own), part(16, 16, files));
        assert_eq!([files(1000, 5000), files(5000, 1000)], [20 * MIB, 12 * MIB]);
        assert_eq!([files(1000, 1100), files(0, 60)], [16 * MIB; 2], "below the threshold");
    }

    #[test]
    fn each_part_keeps_the_minimum() {
        assert_eq!([first(16 * MIB), first(64 * MIB)], [MIN_PART_BYTES, 16 * MIB]);
        assert_eq!(divide(64 * MIB, part(10, 0, 0), part(54, 54, 9000)), 58 * MIB);
        assert_eq!(divide(64 * MIB, part(40, 40, 9000), part(24, 0, 0)), 6 * MIB);
        assert_eq!(divide(16 * MIB, part(48, 48, 0), part(16, 16, 0)), 10 * MIB, "a new total");
    }

    #[test]
    fn both_together_keep_to_the_total_while_memory_moves() {
        let now = |wanted, own, files| {
            let (own, files) = for_now(64 * MIB, wanted * MIB, own * MIB, files * MIB);
            (own / MIB, files / MIB)
        };
        assert_eq!(now(16, 40, 10), (48, 16), "at rest");
        assert_eq!(now(32, 48, 16), (32, 16), "own pages go first");
        assert_eq!(now(32, 32, 16), (32, 32));
        assert_eq!(now(8, 48, 16), (48, 8), "files go first");
        assert_eq!(now(16, 64, 64), (6, 6), "the least of each");
    }
}
