//! Divides local memory between a consumer's own and shared pages.
//!
//! Pure: limits and usage come in as arguments.

use hecaton_memory::PAGE_SIZE;
use hecaton_pager::MIN_PART_BYTES;

/// One of the two parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Part {
    /// Bytes that may be local.
    pub(super) limit: u64,
    /// Bytes that are local.
    pub(super) used: u64,
    /// Pages fetched back since the last division.
    pub(super) came_back: u64,
}

/// The shared part at first: a quarter of `total`, in bytes.
pub(super) fn first_shared(total: u64) -> u64 {
    within(total, total / 4)
}

/// The shared part, in bytes, after the sum of both changed from `before` to `total`.
pub(super) fn scaled(shared: u64, before: u64, total: u64) -> u64 {
    let scaled = u128::from(shared) * u128::from(total) / u128::from(before.max(1));
    within(total, u64::try_from(scaled).unwrap_or(total))
}

/// Bytes that the shared part should have. The part to which clearly more pages come back gets a
/// sixteenth of the sum, or what the other part leaves unused of three quarters of its limit.
pub(super) fn divide(own: Part, shared: Part) -> u64 {
    let total = own.limit + shared.limit;
    // Smaller differences are not worth the evictions that a change costs.
    let noise = total / PAGE_SIZE as u64 / 256;
    let suffers = |one: Part, other: Part| one.came_back > other.came_back * 3 / 2 + noise;
    let spare = |part: Part| (part.limit / 4 * 3).saturating_sub(part.used);
    let amount = |from: Part| (total / 16).max(spare(from));
    let wanted = if suffers(shared, own) {
        shared.limit + amount(own)
    } else if suffers(own, shared) {
        shared.limit.saturating_sub(amount(shared))
    } else {
        return shared.limit;
    };
    within(total, wanted)
}

/// The most that the shared part may have of `total` bytes.
pub(super) fn most_shared(total: u64) -> u64 {
    within(total, total)
}

/// Whole pages, and at least [`MIN_PART_BYTES`] for each part.
fn within(total: u64, shared: u64) -> u64 {
    let most = total.saturating_sub(MIN_PART_BYTES).max(MIN_PART_BYTES);
    shared.clamp(MIN_PART_BYTES, most) / PAGE_SIZE as u64 * PAGE_SIZE as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn part(limit: u64, used: u64, came_back: u64) -> Part {
        Part { limit: limit * MIB, used: used * MIB, came_back }
    }

    #[test]
    fn divide_gives_unused_memory_to_the_part_that_fetches_more() {
        assert_eq!(divide(part(48, 10, 0), part(16, 16, 5000)), 42 * MIB);
        assert_eq!(divide(part(48, 48, 5000), part(16, 4, 0)), 8 * MIB);
    }

    #[test]
    fn divide_moves_one_step_between_two_full_parts() {
        assert_eq!(divide(part(48, 48, 1000), part(16, 16, 5000)), 20 * MIB);
        assert_eq!(divide(part(48, 48, 5000), part(16, 16, 1000)), 12 * MIB);
        assert_eq!(divide(part(48, 48, 1000), part(16, 16, 1100)), 16 * MIB);
        assert_eq!(divide(part(48, 48, 0), part(16, 16, 60)), 16 * MIB, "below the threshold");
    }

    #[test]
    fn each_part_keeps_the_minimum() {
        assert_eq!(first_shared(16 * MIB), MIN_PART_BYTES);
        assert_eq!(first_shared(64 * MIB), 16 * MIB);
        let least = MIN_PART_BYTES / MIB;
        assert_eq!(divide(part(10, 0, 0), part(54, 54, 9000)), (64 - least) * MIB);
        assert_eq!(divide(part(40, 40, 9000), part(24, 0, 0)), MIN_PART_BYTES);
        assert_eq!(scaled(32 * MIB, 64 * MIB, 16 * MIB), 8 * MIB);
        assert_eq!(scaled(60 * MIB, 64 * MIB, 16 * MIB), 10 * MIB);
    }
}
