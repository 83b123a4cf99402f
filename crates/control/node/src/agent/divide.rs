//! One limit for several donors. Pure.

/// A donor: what it could lend, and what it has lent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Lender {
    pub(super) lend_bytes: u64,
    pub(super) used_bytes: u64,
}

/// Each donor's part of a limit, in bytes. The memory that donors have lent comes first, so that
/// the agent recalls no more than it must.
pub(super) fn divide(limit_bytes: u64, lenders: &[Lender]) -> Vec<u64> {
    let mut left = limit_bytes;
    let mut take = |most: u64| {
        let taken = most.min(left);
        left -= taken;
        taken
    };
    let used: Vec<u64> = lenders.iter().map(|one| take(one.used_bytes)).collect();
    let rest = lenders.iter().zip(&used);
    rest.map(|(one, used)| used + take(one.lend_bytes.saturating_sub(*used))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_lent_stays_where_it_is() {
        let lender = |lend_bytes, used_bytes| Lender { lend_bytes, used_bytes };
        let two = [lender(10, 0), lender(10, 6)];
        assert_eq!(divide(20, &two), [10, 10]);
        assert_eq!(divide(8, &two), [2, 6]);
        assert_eq!(divide(4, &two), [0, 4]);
        assert_eq!(divide(100, &two), [10, 10]);
        assert_eq!(divide(100, &[]), [0; 0]);
    }
}
