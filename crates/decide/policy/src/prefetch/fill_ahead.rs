//! How many zero pages to install at a first touch.
//!
//! A page that was never written costs nothing to fetch, but each first touch costs a fault. A
//! program that fills memory front to back gets zero pages ahead in growing runs. No trigger is
//! needed: the first touch after a run is a fault anyway, and if it comes at exactly the run's
//! end, the run was right.
//!
//! A run is never longer than all that was touched before it in the same stream. So at most half of
//! the filled pages are filled in vain. A zero page that stays untouched is dropped at eviction
//! without being written.

/// Streams told apart in one thread.
const STREAMS_PER_THREAD: usize = 8;

/// Threads remembered; the one longest without a first touch gives way.
const MAX_THREADS: usize = 64;

/// The longest run.
pub(super) const MAX_RUN_PAGES: u32 = 512;

#[derive(Clone, Copy)]
struct Run {
    start: u64,
    pages: u32,
    used_at: u64,
}

struct Thread {
    id: u64,
    used_at: u64,
    runs: [Option<Run>; STREAMS_PER_THREAD],
}

/// Finds sequential first touches in one address space.
pub struct FillAhead {
    max_run: u32,
    threads: Vec<Thread>,
    now: u64,
}

impl FillAhead {
    /// Nothing seen yet. Runs stay within a thirty-second of `capacity_pages`.
    pub fn new(capacity_pages: usize) -> Self {
        let max_run = (capacity_pages / 32).clamp(1, MAX_RUN_PAGES as usize) as u32;
        Self { max_run, threads: Vec::new(), now: 0 }
    }

    /// `thread` touched `page` for the first time: how many pages to fill, from `page` upwards,
    /// at least 1. The pager stops the run earlier at the first page that exists.
    pub fn on_zero_fault(&mut self, thread: u64, page: u64) -> u32 {
        self.now += 1;
        let now = self.now;
        let max_run = self.max_run;
        let runs = self.runs_of(thread);
        for run in runs.iter_mut().flatten() {
            let end = run.start + u64::from(run.pages);
            if page == end {
                // Doubling keeps the next run as long as all of the stream so far.
                *run = Run { start: page, pages: (run.pages * 2).min(max_run), used_at: now };
                return run.pages;
            }
            if (run.start..end).contains(&page) {
                // The run was cut short by a page that existed; the stream is as good as it was.
                *run = Run { start: page, used_at: now, ..*run };
                return run.pages;
            }
        }
        let place = runs.iter_mut().min_by_key(|run| run.map(|run| run.used_at));
        if let Some(place) = place {
            *place = Some(Run { start: page, pages: 1, used_at: now });
        }
        1
    }

    fn runs_of(&mut self, id: u64) -> &mut [Option<Run>; STREAMS_PER_THREAD] {
        let at = match self.threads.iter().position(|thread| thread.id == id) {
            Some(at) => at,
            None => {
                let fresh = Thread { id, used_at: 0, runs: [None; STREAMS_PER_THREAD] };
                if self.threads.len() < MAX_THREADS {
                    self.threads.push(fresh);
                    self.threads.len() - 1
                } else {
                    let oldest = self.threads.iter().enumerate().min_by_key(|(_, t)| t.used_at);
                    let at = oldest.map_or(0, |(at, _)| at);
                    self.threads[at] = fresh;
                    at
                }
            }
        };
        self.threads[at].used_at = self.now;
        &mut self.threads[at].runs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// First touches of a walk upwards from `start`: how many faults `pages` pages take.
    fn faults_of_a_walk(fill: &mut FillAhead, thread: u64, start: u64, pages: u64) -> u64 {
        let (mut at, mut faults) = (start, 0);
        while at < start + pages {
            at += u64::from(fill.on_zero_fault(thread, at));
            faults += 1;
        }
        faults
    }

    #[test]
    fn a_walk_takes_few_faults_and_random_touches_fill_nothing() {
        let mut fill = FillAhead::new(1 << 20);
        assert!(faults_of_a_walk(&mut fill, 1, 1 << 30, 10_000) < 32);
        for step in 0..1000u64 {
            assert_eq!(fill.on_zero_fault(1, step.wrapping_mul(7919) % 100_000 * 3), 1);
        }
    }

    #[test]
    fn streams_of_threads_and_within_a_thread_do_not_disturb_each_other() {
        let mut fill = FillAhead::new(1 << 20);
        let mut heads: Vec<u64> = (0..8).map(|stream| stream << 32).collect();
        let mut faults = 0;
        for _ in 0..20 {
            for (stream, head) in heads.iter_mut().enumerate() {
                *head += u64::from(fill.on_zero_fault(stream as u64 % 2, *head));
                faults += 1;
            }
        }
        assert_eq!(faults, 160);
        assert!(heads.iter().enumerate().all(|(s, &head)| head - ((s as u64) << 32) > 5000));
    }

    #[test]
    fn a_run_cut_short_goes_on_as_long_and_small_memory_keeps_runs_short() {
        let mut fill = FillAhead::new(1 << 20);
        for page in [0, 1, 3, 7] {
            fill.on_zero_fault(1, page);
        }
        assert_eq!(fill.on_zero_fault(1, 10), 8);
        assert_eq!(fill.on_zero_fault(1, 18), 16);
        let mut small = FillAhead::new(64);
        assert_eq!((0..40).map(|page| small.on_zero_fault(1, page)).max(), Some(2));
    }
}
