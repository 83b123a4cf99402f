//! Waits for events in tests, and gives them ports.
//!
//! A test waits for what it can see, never for a time that hopes. Each wait has a limit, which only
//! a hang reaches: [`patience`], 60 s unless [`PATIENCE_VARIABLE`] scales it. A wait that fails
//! says what it waited for and what it saw last.

use std::{
    env,
    error::Error,
    fmt,
    net::{Ipv4Addr, TcpListener},
    path::{Path, PathBuf},
    sync::{
        OnceLock,
        atomic::{AtomicU32, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// Multiplies every limit: `HECATON_TEST_PATIENCE=3` on a machine that is three times as slow.
pub const PATIENCE_VARIABLE: &str = "HECATON_TEST_PATIENCE";

const DEFAULT_PATIENCE: Duration = Duration::from_secs(60);

/// Between two looks, at first and at most.
const SHORTEST_TICK: Duration = Duration::from_millis(2);
const LONGEST_TICK: Duration = Duration::from_millis(100);

/// The limit of a wait: 60 s, scaled by [`PATIENCE_VARIABLE`].
///
/// # Panics
/// If the variable is not a number of at least 1.
pub fn patience() -> Duration {
    scaled(DEFAULT_PATIENCE)
}

/// Another limit, scaled in the same way.
///
/// # Panics
/// If the variable is not a number of at least 1.
pub fn scaled(limit: Duration) -> Duration {
    static SCALE: OnceLock<f64> = OnceLock::new();
    limit.mul_f64(*SCALE.get_or_init(|| scale(env::var(PATIENCE_VARIABLE).ok().as_deref())))
}

fn scale(variable: Option<&str>) -> f64 {
    let Some(text) = variable else { return 1.0 };
    let scale = text.parse().ok().filter(|scale| (1.0..=1000.0).contains(scale));
    scale.unwrap_or_else(|| panic!("{PATIENCE_VARIABLE}={text} is not a number from 1 to 1000"))
}

/// A wait that reached its limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TimedOut {
    /// The event.
    pub what: String,
    /// The limit.
    pub limit: Duration,
    /// The state at the last look.
    pub seen: String,
}

impl fmt::Display for TimedOut {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let TimedOut { what, limit, seen } = self;
        write!(formatter, "after {} s, still not: {what}\n    seen: {seen}", limit.as_secs())
    }
}

impl Error for TimedOut {}

/// A directory in memory where there is one, for files that are written through to the disk: a disk
/// may be slow.
pub fn fast_dir() -> PathBuf {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() }
}

/// Looks until `look` returns a value, and returns that. `look` says in its error what it saw.
///
/// Looks at first every 2 ms, and then less and less often: at least every 100 ms.
pub fn wait_for<T, S: fmt::Display>(
    what: &str,
    limit: Duration,
    look: impl FnMut() -> Result<T, S>,
) -> Result<T, TimedOut> {
    wait_with_ticks(what, limit, SHORTEST_TICK, LONGEST_TICK, look)
}

/// The same, with a pause of `tick` between two looks.
pub fn wait_for_every<T, S: fmt::Display>(
    tick: Duration,
    what: &str,
    limit: Duration,
    look: impl FnMut() -> Result<T, S>,
) -> Result<T, TimedOut> {
    wait_with_ticks(what, limit, tick, tick, look)
}

fn wait_with_ticks<T, S: fmt::Display>(
    what: &str,
    limit: Duration,
    shortest: Duration,
    longest: Duration,
    mut look: impl FnMut() -> Result<T, S>,
) -> Result<T, TimedOut> {
    let begun = Instant::now();
    let mut tick = shortest;
    loop {
        // Before the look: one that begins after the limit decides.
        let is_last = begun.elapsed() >= limit;
        match look() {
            Ok(value) => return Ok(value),
            Err(seen) if is_last => {
                return Err(TimedOut { what: what.to_owned(), limit, seen: seen.to_string() });
            }
            Err(_) => thread::sleep(tick),
        }
        tick = (tick * 2).min(longest);
    }
}

/// Waits for at most [`patience`] until the condition holds.
///
/// # Panics
/// If it does not; the message names the event.
#[track_caller]
pub fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    wait_until_seen(what, || holds().then_some(()).ok_or("the condition does not hold"));
}

/// Waits for at most [`patience`] for a value. `look` says in its error what it saw.
///
/// # Panics
/// If there is none; the message names the event and what was seen last.
#[track_caller]
pub fn wait_until_seen<T, S: fmt::Display>(what: &str, look: impl FnMut() -> Result<T, S>) -> T {
    match wait_for(what, patience(), look) {
        Ok(value) => value,
        Err(timed_out) => panic!("{timed_out}"),
    }
}

/// A port of the loopback address for a daemon that is told it and listens later, or again.
///
/// The port is below those that the kernel hands out (from 32768 on), and processes begin to look
/// at different ones: between this call and the daemon's, no other test takes it.
///
/// # Panics
/// If no port can be bound.
pub fn unused_port() -> u16 {
    const FIRST: u32 = 10_240;
    const COUNT: u32 = 32_768 - FIRST;
    // Processes of tests have numbers near each other.
    const APART: u32 = 32;
    static GIVEN: AtomicU32 = AtomicU32::new(0);
    let own = std::process::id().wrapping_mul(APART);
    for _ in 0..COUNT {
        let turn = GIVEN.fetch_add(1, Ordering::Relaxed);
        let port = FIRST + own.wrapping_add(turn) % COUNT;
        let port = u16::try_from(port).expect("FIRST + COUNT is 32768");
        if TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() {
            return port;
        }
    }
    panic!("no port of {COUNT} from {FIRST} on can be bound");
}

/// Waits until a process that was sent SIGSTOP stands still, or has ended.
///
/// The kernel wakes one of its threads to stop them all. On a busy machine the others go on until
/// that one is scheduled.
///
/// # Panics
/// If it does not within [`patience`].
pub fn wait_until_stopped(pid: u32) {
    wait_until(&format!("process {pid} is stopped"), || threads_that_go_on(pid) == 0);
}

fn threads_that_go_on(pid: u32) -> usize {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return 0 };
    let goes_on = |thread: std::fs::DirEntry| {
        let Ok(stat) = std::fs::read_to_string(thread.path().join("stat")) else { return false };
        // The name, in parentheses, may contain anything.
        stat.rsplit(") ").next().is_some_and(|rest| !rest.starts_with(['T', 't', 'Z', 'X']))
    };
    threads.flatten().map(goes_on).filter(|&goes_on| goes_on).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn returns_the_first_value_that_is_seen() {
        let mut looks = 0;
        let value = wait_for("the third look", Duration::MAX / 2, || {
            looks += 1;
            if looks == 3 { Ok(looks) } else { Err(looks) }
        });
        assert_eq!(value, Ok(3));
    }

    #[test]
    fn says_at_the_limit_what_was_seen_last() {
        let waited = wait_for("rain", Duration::ZERO, || Err::<(), _>("a blue sky"));
        let text = waited.expect_err("no rain").to_string();
        assert_eq!(text, "after 0 s, still not: rain\n    seen: a blue sky");
    }

    #[test]
    fn looks_once_more_after_the_limit() {
        let mut looks = 0;
        let value = wait_for("the second look", Duration::from_millis(1), || {
            looks += 1;
            if looks == 2 { Ok(()) } else { Err("only one look") }
        });
        assert_eq!(value, Ok(()));
    }

    #[test]
    fn ports_differ_and_can_be_bound() {
        let ports = [unused_port(), unused_port()];
        assert_ne!(ports[0], ports[1]);
        let bound = ports.map(|port| TcpListener::bind((Ipv4Addr::LOCALHOST, port)));
        assert!(bound.iter().all(Result::is_ok), "{bound:?}");
    }

    #[test]
    fn scales_by_a_number_from_1_to_1000() {
        assert_eq!(scale(None), 1.0);
        assert_eq!(scale(Some("2.5")), 2.5);
        for wrong in ["", "fast", "0.5", "-1", "NaN", "1001"] {
            let refused = std::panic::catch_unwind(|| scale(Some(wrong)));
            assert!(refused.is_err(), "{wrong:?} is taken");
        }
    }

    #[test]
    fn a_stopped_process_stands_still() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        assert_eq!(threads_that_go_on(child.id()), 1);
        let kill = |signal: &str| {
            let id = child.id().to_string();
            assert!(
                std::process::Command::new("kill").args([signal, &id]).status().unwrap().success()
            );
        };
        kill("-STOP");
        wait_until_stopped(child.id());
        assert_eq!(threads_that_go_on(child.id()), 0);
        kill("-KILL");
        child.wait().unwrap();
        wait_until_stopped(child.id());
    }
}
