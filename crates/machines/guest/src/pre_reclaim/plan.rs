//! When memory is readied, how much, and when it is given back. No I/O and no clock.

use std::time::Duration;

/// How long after the host has last asked, readied memory is kept.
const SILENCE: Duration = Duration::from_secs(1);

/// How long if it has announced that it will take more.
const ANNOUNCED_SILENCE: Duration = Duration::from_secs(10);

/// Most blocks that are readied before another look.
const AT_ONCE: u64 = 4;

/// The memory as it is.
#[derive(Clone, Copy, Debug)]
pub(super) struct View {
    /// Bytes that the kernel has, plus readied bytes. Shrinks as soon as a block is on its way to
    /// the host.
    pub(super) total_bytes: u64,
    /// Readied part of `total_bytes`.
    pub(super) readied_bytes: u64,
    /// Size of one memory block, in bytes.
    pub(super) block_bytes: u64,
    /// Bytes that the host has announced and not taken yet; `None` without an announcement.
    pub(super) announced_bytes: Option<u64>,
    /// Available bytes beyond those that must stay free, without the readied ones.
    pub(super) spare_bytes: u64,
}

/// The next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// So many more blocks are to be readied.
    Ready(u64),
    /// All that is readied is to be used again.
    GiveBack,
    /// Nothing.
    Rest,
}

/// Decides the steps, and remembers when the host last asked.
#[derive(Debug)]
pub(super) struct Plan {
    ahead_bytes: u64,
    last: Option<(u64, Option<u64>)>,
    asked_at: Option<Duration>,
}

impl Plan {
    /// No more than `ahead_bytes` at once.
    pub(super) fn new(ahead_bytes: u64) -> Plan {
        Plan { ahead_bytes, last: None, asked_at: None }
    }

    /// Decides the next step.
    pub(super) fn step(&mut self, view: &View, now: Duration) -> Step {
        let owes = view.announced_bytes.is_some_and(|bytes| bytes > 0);
        if let Some((total_bytes, announced_bytes)) = self.last {
            let has_taken = view.total_bytes < total_bytes;
            let has_announced = owes && announced_bytes != view.announced_bytes;
            if has_taken || has_announced {
                self.asked_at = Some(now);
            }
            if view.total_bytes > total_bytes {
                // It gives; what it took before is over.
                self.asked_at = None;
            }
        } else if owes {
            self.asked_at = Some(now);
        }
        self.last = Some((view.total_bytes, view.announced_bytes));
        let silence = if owes { ANNOUNCED_SILENCE } else { SILENCE };
        let is_asked = self.asked_at.is_some_and(|at| now.saturating_sub(at) < silence);
        if !is_asked || view.announced_bytes == Some(0) {
            return if view.readied_bytes > 0 { Step::GiveBack } else { Step::Rest };
        }
        // A host that announces how much it takes needs no more than that.
        let most = view.announced_bytes.map_or(self.ahead_bytes, |bytes| {
            bytes.next_multiple_of(view.block_bytes).min(self.ahead_bytes)
        });
        let fit = most.saturating_sub(view.readied_bytes) / view.block_bytes;
        // Without a word before, applications have given nothing yet, and the driver takes at the
        // same time.
        let left = view.block_bytes * u64::from(!owes);
        let spare = view.spare_bytes.saturating_sub(left) / view.block_bytes;
        match fit.min(spare).min(AT_ONCE) {
            0 => Step::Rest,
            blocks => Step::Ready(blocks),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const M: u64 = 1 << 20;

    fn view(total: u64, readied: u64) -> View {
        View {
            total_bytes: total * M,
            readied_bytes: readied * M,
            block_bytes: 128 * M,
            announced_bytes: None,
            spare_bytes: 4096 * M,
        }
    }

    fn at(tenths: u64) -> Duration {
        Duration::from_millis(tenths * 100)
    }

    #[test]
    fn once_the_host_has_taken_more_is_readied_until_a_second_of_silence() {
        let mut plan = Plan::new(300 * M);
        assert_eq!(plan.step(&view(2048, 0), at(0)), Step::Rest, "nobody has asked");
        assert_eq!(plan.step(&view(1920, 0), at(1)), Step::Ready(2));
        assert_eq!(plan.step(&view(1920, 128), at(2)), Step::Ready(1));
        assert_eq!(plan.step(&view(1920, 256), at(3)), Step::Rest, "no more than 300 MiB ahead");
        assert_eq!(plan.step(&view(1792, 128), at(9)), Step::Ready(1), "it has taken one of them");
        assert_eq!(plan.step(&view(1792, 256), at(18)), Step::Rest);
        assert_eq!(plan.step(&view(1792, 256), at(19)), Step::GiveBack);
        assert_eq!(plan.step(&view(1792, 0), at(20)), Step::Rest);
    }

    #[test]
    fn what_is_announced_is_readied_and_no_more() {
        let mut plan = Plan::new(2048 * M);
        let announced =
            |readied, bytes| View { announced_bytes: Some(bytes * M), ..view(2048, readied) };
        assert_eq!(plan.step(&announced(0, 200), at(0)), Step::Ready(2));
        assert_eq!(plan.step(&announced(128, 200), at(1)), Step::Ready(1));
        assert_eq!(plan.step(&announced(256, 200), at(50)), Step::Rest, "it will come");
        assert_eq!(plan.step(&announced(256, 200), at(100)), Step::GiveBack, "it has not");
        assert_eq!(plan.step(&announced(0, 100), at(110)), Step::Ready(1), "a new one");
        assert_eq!(plan.step(&announced(128, 0), at(111)), Step::GiveBack, "all is taken");
    }

    #[test]
    fn what_is_needed_is_not_readied_and_who_gives_does_not_ask() {
        let mut plan = Plan::new(2048 * M);
        plan.step(&view(2048, 0), at(0));
        let full = View { spare_bytes: 255 * M, ..view(1920, 0) };
        assert_eq!(plan.step(&full, at(1)), Step::Rest);
        let some = View { spare_bytes: 400 * M, ..view(1920, 0) };
        assert_eq!(plan.step(&some, at(1)), Step::Ready(2), "one is left to the driver");
        assert_eq!(plan.step(&view(1920, 0), at(2)), Step::Ready(4));
        assert_eq!(plan.step(&view(2048, 128), at(3)), Step::GiveBack);
    }
}
