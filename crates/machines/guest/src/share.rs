//! Divides memory among applications.

/// Memory bounds of one application.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Its name.
    pub name: String,
    /// Lower bound of the application's limit, in bytes.
    pub min_bytes: u64,
    /// Upper bound of the application's limit, in bytes.
    pub max_bytes: u64,
    /// The application is told when the VM is about to be evicted.
    pub hears_of_evictions: bool,
}

/// Divides `budget_bytes` into one limit per application, in bytes. Each gets its minimum, even
/// beyond the budget. The last one gets the rest up to its maximum, then the one before it, and so
/// on. So the first one gives back first, and the next one only when the first is at its minimum.
pub fn limits(budget_bytes: u64, applications: &[Bounds]) -> Vec<u64> {
    let mut left = budget_bytes.saturating_sub(least(applications));
    let mut limits: Vec<u64> = applications.iter().map(|one| one.min_bytes).collect();
    for (limit, one) in limits.iter_mut().zip(applications).rev() {
        let more = left.min(one.max_bytes.saturating_sub(one.min_bytes));
        *limit += more;
        left -= more;
    }
    limits
}

/// Sum of all minima, in bytes.
pub(crate) fn least(applications: &[Bounds]) -> u64 {
    applications.iter().fold(0, |sum, one| sum.saturating_add(one.min_bytes))
}

/// Sum of all maxima, in bytes.
pub(crate) fn most(applications: &[Bounds]) -> u64 {
    applications.iter().fold(0, |sum, one| sum.saturating_add(one.max_bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn bounds() -> impl Strategy<Value = Vec<Bounds>> {
        let one = (0u64..1 << 40, 0u64..1 << 40).prop_map(|(a, b)| Bounds {
            name: String::new(),
            min_bytes: a.min(b),
            max_bytes: a.max(b),
            hears_of_evictions: false,
        });
        prop::collection::vec(one, 0..8)
    }

    proptest! {
        #[test]
        fn the_first_gives_first_and_nobody_less_than_its_minimum(
            applications in bounds(), budget in 0u64..1 << 42,
        ) {
            let limits = limits(budget, &applications);
            let sum: u64 = limits.iter().sum();
            prop_assert!(sum <= budget.max(least(&applications)));
            for (at, (limit, one)) in limits.iter().zip(&applications).enumerate() {
                prop_assert!((one.min_bytes..=one.max_bytes).contains(limit));
                let before = limits[..at].iter().zip(&applications);
                let are_least = before.clone().all(|(limit, one)| *limit == one.min_bytes);
                prop_assert!(*limit == one.max_bytes || are_least);
            }
            let is_full = limits.iter().zip(&applications).all(|(limit, one)| *limit == one.max_bytes);
            prop_assert!(is_full || sum >= budget, "nothing is left over that somebody could have");
        }

        #[test]
        fn less_memory_is_more_for_nobody(
            applications in bounds(), budget in 0u64..1 << 42, less in 0u64..1 << 42,
        ) {
            let (more, less) = (limits(budget, &applications), limits(budget.saturating_sub(less), &applications));
            prop_assert!(less.iter().zip(&more).all(|(less, more)| less <= more));
        }
    }
}
