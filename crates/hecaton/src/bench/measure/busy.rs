//! How much of the machine's processors something took, whoever it was that used them: a sweep over
//! pool memory is the work of the program, its pager and the donors together.

use anyhow::Context as _;
use std::time::Instant;

/// Ticks of `/proc/stat` in a second; Linux shows them so on every machine.
const TICKS_PER_SECOND: f64 = 100.0;

/// From when on.
pub(crate) struct Busy {
    since: Instant,
    ticks: u64,
}

impl Busy {
    pub(crate) fn start() -> anyhow::Result<Self> {
        Ok(Self { since: Instant::now(), ticks: ticks()? })
    }

    /// Seconds that have passed, and seconds of processors that were used in them.
    pub(crate) fn stop(self) -> anyhow::Result<(f64, f64)> {
        let elapsed = self.since.elapsed().as_secs_f64();
        Ok((elapsed, (ticks()? - self.ticks) as f64 / TICKS_PER_SECOND))
    }
}

fn ticks() -> anyhow::Result<u64> {
    let stat = std::fs::read_to_string("/proc/stat").context("cannot read /proc/stat")?;
    busy_ticks(&stat).context("/proc/stat begins with no line of all processors")
}

/// Everything but idling and waiting for disks; what the hypervisor took away is not used either.
fn busy_ticks(stat: &str) -> Option<u64> {
    let line = stat.lines().next()?.strip_prefix("cpu ")?;
    let fields: Vec<u64> = line.split_whitespace().map_while(|field| field.parse().ok()).collect();
    let [user, nice, system, _idle, _iowait, irq, softirq, ..] = fields[..] else { return None };
    Some(user + nice + system + irq + softirq)
}

#[cfg(test)]
mod tests {
    use super::*;
    use hecaton_testkit::wait_until;

    #[test]
    fn idling_and_stolen_time_are_left_out() {
        let stat = "cpu  1 2 4 1000 1000 8 16 1000 0 0\ncpu0 1 2 4 1000 1000 8 16 1000 0 0\n";
        assert_eq!(busy_ticks(stat), Some(31));
        assert_eq!(busy_ticks("intr 5\n"), None);
    }

    #[test]
    fn work_takes_processors() {
        let busy = Busy::start().unwrap();
        let since = busy.since;
        wait_until("processors are used", || {
            for number in 0..10_000_000_u64 {
                std::hint::black_box(number);
            }
            ticks().unwrap() > busy.ticks
        });
        let least = since.elapsed().as_secs_f64();
        let (elapsed, used) = busy.stop().unwrap();
        let most = since.elapsed().as_secs_f64();
        assert!((least..=most).contains(&elapsed), "{elapsed} s is not from {least} s to {most} s");
        assert!(used > 0.0, "{used} s in {elapsed} s");
    }
}
