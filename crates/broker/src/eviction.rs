//! Which harvest VMs have to go when their minimum is needed.

use crate::host::VmId;

/// One that could go.
#[derive(Clone, Debug)]
pub(crate) struct Candidate {
    pub(crate) vm: VmId,
    /// What is to be had by it on each node, beyond what it gives back anyway.
    pub(crate) base_bytes: Vec<u64>,
    /// It goes whatever is decided here.
    pub(crate) is_going: bool,
    /// It was warned: better the same than another one.
    pub(crate) is_warned: bool,
}

/// Those whose minimum covers what is missing on each node; as many as there are, if that is not
/// enough. The smallest that is sufficient goes; if none is, the largest, and another one.
pub(crate) fn victims(missing: &[u64], candidates: &[Candidate]) -> Vec<VmId> {
    let mut missing = missing.to_vec();
    let mut chosen: Vec<&Candidate> = candidates.iter().filter(|c| c.is_going).collect();
    for candidate in &chosen {
        subtract(&mut missing, &candidate.base_bytes);
    }
    let most = |missing: &[u64]| {
        (0..missing.len()).filter(|&n| missing[n] > 0).max_by_key(|&n| missing[n])
    };
    while let Some(node) = most(&missing) {
        let is_free =
            |c: &&Candidate| c.base_bytes[node] > 0 && !chosen.iter().any(|other| other.vm == c.vm);
        let best = candidates.iter().filter(is_free).min_by_key(|c| {
            let has = c.base_bytes[node];
            let suffices = has >= missing[node];
            let rank = if suffices { has } else { u64::MAX - has };
            (!c.is_warned, !suffices, rank, c.vm)
        });
        match best {
            Some(candidate) => {
                subtract(&mut missing, &candidate.base_bytes);
                chosen.push(candidate);
            }
            // All are going, and it is not enough.
            None => missing[node] = 0,
        }
    }
    chosen.into_iter().map(|candidate| candidate.vm).collect()
}

fn subtract(missing: &mut [u64], bytes: &[u64]) {
    for (missing, bytes) in missing.iter_mut().zip(bytes) {
        *missing = missing.saturating_sub(*bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(vm: u64, base: [u64; 2]) -> Candidate {
        Candidate { vm: VmId(vm), base_bytes: base.to_vec(), is_going: false, is_warned: false }
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
    fn who_goes_already_counts_and_who_was_warned_comes_first() {
        let mut all = [candidate(1, [10, 0]), candidate(2, [4, 0])];
        all[0].is_warned = true;
        assert_eq!(victims(&[3, 0], &all), [VmId(1)]);
        all[0].is_going = true;
        assert_eq!(victims(&[0, 0], &all), [VmId(1)]);
        assert_eq!(victims(&[11, 0], &all), [VmId(1), VmId(2)]);
    }
}
