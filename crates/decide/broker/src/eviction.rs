//! Chooses the harvest VMs that must go when their minimum is needed.
//!
//! A need is a list of numbers: bytes of one node after the other, and last the cores. Numbers are
//! compared only within one position of the list.

use crate::host::VmId;

/// One that could go.
#[derive(Clone, Debug)]
pub(crate) struct Candidate {
    pub(crate) vm: VmId,
    /// Bytes of each node, then cores, that it gives beyond what it gives back anyway.
    pub(crate) gives: Vec<u64>,
    /// It goes whatever is decided here.
    pub(crate) is_going: bool,
    /// It was warned: better the same than another one.
    pub(crate) is_warned: bool,
}

/// Those whose minimum covers all that is missing; as many as there are, if that is not
/// enough. The smallest that is sufficient goes; if none is, the largest, and another one.
pub(crate) fn victims(missing: &[u64], candidates: &[Candidate]) -> Vec<VmId> {
    let mut left = missing.to_vec();
    let mut chosen: Vec<&Candidate> = candidates.iter().filter(|c| c.is_going).collect();
    for candidate in &chosen {
        subtract(&mut left, &candidate.gives);
    }
    let most = |left: &[u64]| (0..left.len()).filter(|&n| left[n] > 0).max_by_key(|&n| left[n]);
    while let Some(at) = most(&left) {
        let is_free =
            |c: &&Candidate| c.gives[at] > 0 && !chosen.iter().any(|other| other.vm == c.vm);
        let best = candidates.iter().filter(is_free).min_by_key(|c| {
            let has = c.gives[at];
            let suffices = has >= left[at];
            let rank = if suffices { has } else { u64::MAX - has };
            (!c.is_warned, !suffices, rank, c.vm)
        });
        match best {
            Some(candidate) => {
                subtract(&mut left, &candidate.gives);
                chosen.push(candidate);
            }
            // All are going, and it is not enough.
            None => left[at] = 0,
        }
    }
    spare(missing, &mut chosen);
    chosen.into_iter().map(|candidate| candidate.vm).collect()
}

/// Leaves out who need not go after all: whoever was chosen later, for something else, gives enough
/// of both.
fn spare(missing: &[u64], chosen: &mut Vec<&Candidate>) {
    let left_by = |chosen: &[&Candidate]| {
        let mut left = missing.to_vec();
        chosen.iter().for_each(|candidate| subtract(&mut left, &candidate.gives));
        left
    };
    let left = left_by(chosen);
    let mut at = 0;
    while at < chosen.len() {
        let mut others = chosen.clone();
        others.remove(at);
        if !chosen[at].is_going && left_by(&others) == left {
            *chosen = others;
        } else {
            at += 1;
        }
    }
}

fn subtract(missing: &mut [u64], gives: &[u64]) {
    for (missing, gives) in missing.iter_mut().zip(gives) {
        *missing = missing.saturating_sub(*gives);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(vm: u64, gives: [u64; 2]) -> Candidate {
        Candidate { vm: VmId(vm), gives: gives.to_vec(), is_going: false, is_warned: false }
    }

    #[test]
    fn as_few_and_as_small_as_suffice() {
        let all = [candidate(1, [10, 0]), candidate(2, [4, 0]), candidate(3, [0, 9])];
        assert_eq!(victims(&[0, 0], &all), []);
        assert_eq!(victims(&[3, 0], &all), [VmId(2)]);
        assert_eq!(victims(&[5, 0], &all), [VmId(1)]);
        assert_eq!(victims(&[12, 0], &all), [VmId(1), VmId(2)]);
        assert_eq!(victims(&[99, 1], &all), [VmId(1), VmId(2), VmId(3)]);
    }

    #[test]
    fn one_that_has_both_spares_another() {
        let mut all = [candidate(1, [100, 1]), candidate(2, [160, 4])];
        assert_eq!(victims(&[80, 1], &all), [VmId(1)]);
        assert_eq!(victims(&[80, 4], &all), [VmId(2)]);
        assert_eq!(victims(&[0, 5], &all), [VmId(2), VmId(1)]);
        // Also one that was warned when fewer cores were needed; but not one that is killed
        // already.
        all[0].is_warned = true;
        assert_eq!(victims(&[80, 4], &all), [VmId(2)]);
        all[0].is_going = true;
        assert_eq!(victims(&[80, 4], &all), [VmId(1), VmId(2)]);
    }

    #[test]
    fn who_goes_already_counts_and_who_was_warned_comes_first() {
        let mut all = [candidate(1, [10, 0]), candidate(2, [4, 0])];
        all[0].is_warned = true;
        assert_eq!(victims(&[3, 0], &all), [VmId(1)]);
        all[0].is_going = true;
        assert_eq!(victims(&[0, 0], &all), [VmId(1)]);
        assert_eq!(victims(&[11, 0], &all), [VmId(1), VmId(2)]);
    }
}
