//! Tracks devices and donors that owe memory.
//! Records when each was asked to give memory back, and when it last gave some.

use crate::accounts::books::Key;
use std::collections::BTreeMap;
use std::time::Duration;

/// Longest time between two looks that counts against a debtor. A caller that stood still has asked
/// nobody meanwhile, and has seen nothing of what was given.
const LONGEST_LOOK: Duration = Duration::from_secs(2);

/// The debt of a device or of a node's donors.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Debt {
    /// When it was asked. Moved later by all time in which it had met every request so far.
    asked_at: Duration,
    gave_at: Duration,
    noted_at: Duration,
    least_charge: u64,
}

impl Debt {
    /// How long the debtor has given nothing, for a VM that has waited since `from`.
    pub(crate) fn silent(&self, from: Duration, now: Duration) -> Duration {
        now.saturating_sub(self.gave_at.max(from))
    }

    /// How long the debtor has taken, for a VM that has waited since `from`.
    pub(crate) fn taking(&self, from: Duration, now: Duration) -> Duration {
        now.saturating_sub(self.asked_at.max(from))
    }
}

/// All debts that are not settled yet.
#[derive(Clone, Debug, Default)]
pub(crate) struct Debts(BTreeMap<Key, Debt>);

impl Debts {
    /// Leaves out the time in which the caller stood still. To be called before the debts are
    /// looked at.
    pub(crate) fn pass(&mut self, now: Duration) {
        for debt in self.0.values_mut() {
            let unseen = now.saturating_sub(debt.noted_at).saturating_sub(LONGEST_LOOK);
            for at in [&mut debt.asked_at, &mut debt.gave_at, &mut debt.noted_at] {
                *at += unseen;
            }
        }
    }

    /// Updates one debt: bytes charged, bytes of them owed, and whether a request is unmet.
    pub(crate) fn note(&mut self, key: Key, charge: u64, owes: u64, asked: bool, now: Duration) {
        if owes == 0 {
            self.0.remove(&key);
            return;
        }
        let Some(debt) = self.0.get_mut(&key) else {
            if asked {
                let debt =
                    Debt { asked_at: now, gave_at: now, noted_at: now, least_charge: charge };
                self.0.insert(key, debt);
            }
            return;
        };
        if !asked {
            debt.asked_at += now.saturating_sub(debt.noted_at);
            debt.gave_at = now;
        }
        if charge < debt.least_charge {
            debt.least_charge = charge;
            debt.gave_at = now;
        }
        debt.noted_at = now;
    }

    pub(crate) fn get(&self, key: Key) -> Option<&Debt> {
        self.0.get(&key)
    }

    /// Whether the debtor has given nothing for `patience`, no matter which VM waits.
    pub(crate) fn is_stuck(&self, key: Key, patience: Duration, now: Duration) -> bool {
        self.get(key).is_some_and(|debt| debt.silent(Duration::ZERO, now) >= patience)
    }

    pub(crate) fn retain(&mut self, keep: impl Fn(&Key) -> bool) {
        self.0.retain(|key, _| keep(key));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: fn(u64) -> Duration = Duration::from_secs;

    #[test]
    fn a_debtor_does_not_pay_for_a_caller_that_stood_still() {
        let (mut debts, key) = (Debts::default(), Key::Lent(0));
        for second in [0, 1, 2, 32, 33] {
            debts.pass(S(second));
            debts.note(key, 8, 4, true, S(second));
        }
        let debt = debts.get(key).expect("it owes");
        assert_eq!(debt.silent(S(0), S(33)), S(5));
        assert_eq!(debt.taking(S(0), S(33)), S(5));
    }
}
