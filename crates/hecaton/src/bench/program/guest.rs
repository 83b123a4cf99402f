//! Carries out requests of `bench vm` and `bench harvest` within a guest.
//!
//! Requests arrive on standard input and answers leave on standard output, one line of JSON each.
//! All times are taken here, by the guest's clock on the guest's processor: the cost of a fault is
//! that of the instruction that faults, with everything that the hypervisor adds.

use crate::bench::measure::redis_client::Client;
use crate::bench::measure::region::{Region, noise};
use crate::bench::measure::stats::{Latencies, Percentiles};
use crate::bench::world::process::{Guarded, eventually};
use anyhow::{Context as _, bail, ensure};
use hecaton_memory::SplitMix;
use serde::{Deserialize, Serialize};
use std::{
    io::{BufRead as _, Write as _},
    ops::Range,
    process::{Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// Arguments of `guest`: it has none, all is asked for.
#[derive(clap::Args)]
pub(crate) struct Args {}

/// A request of the bench.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(in crate::bench) enum Request {
    /// Run this in a shell. Answered with [`Answer::Said`].
    Shell(String),
    /// Report the available memory. Answered with [`Answer::Available`].
    Available,
    /// Release the region, if any, and fill a new one of `pages` pages.
    Fill { pages: u64 },
    /// Touch `samples` untouched pages of the region in random order; write to those that are odd.
    /// Answered with [`Answer::Touched`].
    Touch { samples: u64 },
    /// Write to random ones of `pages` other pages in `threads` threads, until [`Request::Calm`].
    Storm { pages: u64, threads: u32 },
    /// End the storm. Answered with [`Answer::Stormed`].
    Calm,
    /// Start a Redis server and set this number of keys.
    Keys(u64),
    /// Read `count` random keys of the range `keys`. Answered with [`Answer::Queried`].
    Query { keys: Range<u64>, count: u64 },
    /// Compare a sample of all keys with the values that were set.
    Compare,
}

/// The answer to a request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(in crate::bench) enum Answer {
    /// The request was carried out.
    Done,
    /// The request failed, for this reason.
    Failed(String),
    /// The shell's output.
    Said(String),
    /// Available memory, in bytes.
    Available(u64),
    /// How long the accesses took.
    Touched(Touched),
    /// Page writes of a storm, and how long it lasted.
    Stormed { pages: u64, seconds: f64 },
    /// How long the queries took.
    Queried { seconds: f64 },
}

/// Measurements of [`Request::Touch`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(in crate::bench) struct Touched {
    /// First accesses to a page since the region was filled that took at least [`FAULT_AT_LEAST`].
    pub(in crate::bench) faulted: Percentiles,
    /// Accesses right after those: the cost of measuring, and of an access without a fault.
    pub(in crate::bench) again: Percentiles,
}

/// Every fault takes longer: a pager must wake, and then wake the guest. An access without a fault
/// is shorter, unless it is interrupted. A guest cannot see which of its pages are at a donor; the
/// pager counts the faults and reports how many they were.
const FAULT_AT_LEAST: Duration = Duration::from_micros(3);

/// The port on which Redis listens in the guest.
const REDIS_PORT: u16 = 6379;

/// Redis starts slowly on an emulated processor.
const REDIS_PATIENCE: Duration = Duration::from_secs(60);

/// Limit for setting all keys.
const FILL_PATIENCE: Duration = Duration::from_secs(600);

pub(super) fn run() -> anyhow::Result<()> {
    let mut guest = Guest::default();
    // Tells the bench that requests are accepted from now on.
    println!("{}", serde_json::to_string(&Answer::Done)?);
    for line in std::io::stdin().lock().lines() {
        let answer = match serde_json::from_str(&line?) {
            Ok(request) => guest.answer(request),
            Err(error) => Err(error).context("not a request"),
        };
        let answer = answer.unwrap_or_else(|error| Answer::Failed(format!("{error:#}")));
        println!("{}", serde_json::to_string(&answer)?);
        std::io::stdout().flush()?;
    }
    Ok(())
}

#[derive(Default)]
struct Guest {
    filled: Option<Filled>,
    storm: Option<Storm>,
    redis: Option<Redis>,
    random: SplitMix,
}

struct Filled {
    region: Region,
    pages: u64,
    /// Pages that were not touched yet; the last one is touched next.
    untouched: Vec<u32>,
}

struct Redis {
    client: Client,
    keys: u64,
    _server: Guarded,
}

impl Guest {
    fn answer(&mut self, request: Request) -> anyhow::Result<Answer> {
        match request {
            Request::Shell(script) => return shell(&script).map(Answer::Said),
            Request::Available => return available_bytes().map(Answer::Available),
            Request::Fill { pages } => {
                self.filled = None;
                self.filled = Some(Filled::new(pages, &mut self.random)?);
            }
            Request::Touch { samples } => {
                let filled = self.filled.as_mut().context("nothing is filled")?;
                return filled.touch(samples).map(Answer::Touched);
            }
            Request::Storm { pages, threads } => {
                ensure!(self.storm.is_none(), "there is a storm already");
                self.storm = Some(Storm::start(pages, threads)?);
            }
            Request::Calm => {
                let storm = self.storm.take().context("there is no storm")?;
                return storm.end();
            }
            Request::Keys(keys) => self.redis = Some(Redis::start(keys)?),
            Request::Query { keys, count } => {
                let random = &mut self.random;
                let redis = self.redis.as_mut().context("there is no database")?;
                let took = redis.client.query(keys, count, random)?;
                return Ok(Answer::Queried { seconds: took.as_secs_f64() });
            }
            Request::Compare => {
                let redis = self.redis.as_mut().context("there is no database")?;
                redis.client.compare(redis.keys)?;
            }
        }
        Ok(Answer::Done)
    }
}

fn shell(script: &str) -> anyhow::Result<String> {
    let output = Command::new("sh")
        .args(["-c", script])
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .context("cannot run a shell")?;
    ensure!(output.status.success(), "`{script}` ended with {}", output.status);
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn available_bytes() -> anyhow::Result<u64> {
    let text = std::fs::read_to_string("/proc/meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    Ok(kib.context("/proc/meminfo has no MemAvailable")? << 10)
}

impl Filled {
    fn new(pages: u64, random: &mut SplitMix) -> anyhow::Result<Self> {
        ensure!(pages > 0, "a region of no pages");
        let mut region = Region::new(pages)?;
        let mut block = noise(pages);
        for page in 0..pages {
            block[0] = page;
            region.fill(page, &block);
        }
        let mut untouched: Vec<u32> = (0..u32::try_from(pages)?).collect();
        for last in (1..untouched.len()).rev() {
            let other = random.draw() % (last as u64 + 1);
            untouched.swap(last, other as usize);
        }
        Ok(Self { region, pages, untouched })
    }

    fn touch(&mut self, samples: u64) -> anyhow::Result<Touched> {
        ensure!(
            samples <= self.untouched.len() as u64,
            "{samples} pages are to be touched, and {} of {} are left",
            self.untouched.len(),
            self.pages
        );
        let (mut faulted, mut again) = (Latencies::new(), Latencies::new());
        for _ in 0..samples {
            let Some(page) = self.untouched.pop().map(u64::from) else { break };
            let first = self.access(page)?;
            if first >= FAULT_AT_LEAST {
                faulted.record(first);
            }
            again.record(self.access(page)?);
        }
        Ok(Touched { faulted: faulted.percentiles(), again: again.percentiles() })
    }

    fn access(&mut self, page: u64) -> anyhow::Result<Duration> {
        let start = Instant::now();
        let found = if page % 2 == 1 {
            self.region.write(page, page);
            page
        } else {
            self.region.read(page)
        };
        let took = start.elapsed();
        ensure!(found == page, "page {page} holds {found:x}");
        Ok(took)
    }
}

/// Threads that write to random pages until `over` is set.
struct Storm {
    threads: Vec<JoinHandle<anyhow::Result<()>>>,
    over: Arc<AtomicBool>,
    written: Arc<AtomicU64>,
    start: Instant,
}

impl Storm {
    /// Starts the threads, and returns when all have filled their memory.
    fn start(pages: u64, threads: u32) -> anyhow::Result<Self> {
        let share = pages / u64::from(threads.max(1));
        ensure!(share > 0, "{pages} pages are too few for {threads} threads");
        let (over, written) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (filled, all_filled) = std::sync::mpsc::channel();
        let threads = (0..threads).map(|number| {
            let (over, written, filled) = (over.clone(), written.clone(), filled.clone());
            thread::spawn(move || {
                let mut region = Region::new(share)?;
                let block = noise(u64::from(number));
                (0..share).for_each(|page| region.fill(page, &block));
                let _ = filled.send(());
                drop(filled);
                let mut random = SplitMix::new(u64::from(number));
                while !over.load(Ordering::Relaxed) {
                    for _ in 0..64 {
                        let word = random.draw();
                        region.write(word % share, word);
                    }
                    written.fetch_add(64, Ordering::Relaxed);
                }
                Ok(())
            })
        });
        let threads: Vec<_> = threads.collect();
        drop(filled);
        let count = all_filled.iter().count();
        if count < threads.len() {
            over.store(true, Ordering::Relaxed);
            bail!("only {count} of {} threads have their memory", threads.len());
        }
        written.store(0, Ordering::Relaxed);
        Ok(Self { threads, over, written, start: Instant::now() })
    }

    fn end(self) -> anyhow::Result<Answer> {
        let (pages, seconds) =
            (self.written.load(Ordering::Relaxed), self.start.elapsed().as_secs_f64());
        self.over.store(true, Ordering::Relaxed);
        for thread in self.threads {
            thread.join().ok().context("a thread of the storm panicked")??;
        }
        Ok(Answer::Stormed { pages, seconds })
    }
}

impl Redis {
    fn start(keys: u64) -> anyhow::Result<Self> {
        let mut server = Guarded::spawn(
            Command::new("redis-server")
                .args(["--bind", "127.0.0.1", "--port", &REDIS_PORT.to_string()])
                .args(["--save", "", "--appendonly", "no"])
                .stdin(Stdio::null())
                .stdout(Stdio::null()),
        )?;
        let mut client = eventually(REDIS_PATIENCE, || {
            if let Some(status) = server.exit_status()? {
                return Ok(Err(anyhow::anyhow!("redis-server ended with {status}")));
            }
            Client::connect(REDIS_PORT).map(Ok)
        })??;
        ensure!(
            client.fill(keys, Instant::now() + FILL_PATIENCE)?,
            "{keys} keys were not set within {} s",
            FILL_PATIENCE.as_secs()
        );
        Ok(Self { client, keys, _server: server })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hecaton_testkit::wait_until;

    #[test]
    fn requests_are_answered() {
        let mut guest = Guest::default();
        let mut ask = |request| guest.answer(request);
        assert_eq!(
            ask(Request::Shell("echo 1; echo 2".into())).unwrap(),
            Answer::Said("1\n2\n".into())
        );
        assert!(ask(Request::Shell("exit 3".into())).is_err());
        assert!(ask(Request::Touch { samples: 1 }).is_err(), "nothing is filled");
        assert_eq!(ask(Request::Fill { pages: 100 }).unwrap(), Answer::Done);
        let Answer::Touched(touched) = ask(Request::Touch { samples: 60 }).unwrap() else {
            panic!("another answer")
        };
        assert_eq!(touched.again.count, 60);
        assert!(ask(Request::Touch { samples: 41 }).is_err(), "each page is touched once");
        assert!(ask(Request::Touch { samples: 40 }).is_ok());
        assert!(ask(Request::Compare).is_err(), "there is no database");
    }

    #[test]
    fn a_storm_lasts_until_it_is_calmed() {
        let mut guest = Guest::default();
        guest.answer(Request::Storm { pages: 64, threads: 2 }).unwrap();
        assert!(guest.answer(Request::Storm { pages: 64, threads: 2 }).is_err());
        let storm = guest.storm.as_ref().unwrap();
        wait_until("pages are written", || storm.written.load(Ordering::Relaxed) > 0);
        let Answer::Stormed { pages, .. } = guest.answer(Request::Calm).unwrap() else {
            panic!("another answer")
        };
        assert!(pages > 0);
        assert!(guest.answer(Request::Calm).is_err());
    }

    #[test]
    fn what_is_said_is_read_again() {
        let query = Request::Query { keys: 3..9, count: 7 };
        let line = serde_json::to_string(&query).unwrap();
        assert_eq!(line, r#"{"query":{"keys":{"start":3,"end":9},"count":7}}"#);
        assert_eq!(serde_json::from_str::<Request>(&line).unwrap(), query);
    }
}
