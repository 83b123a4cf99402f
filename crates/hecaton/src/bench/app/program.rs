//! The programs of `bench app`, each with input that does not compress and a check of its result.

use super::{redis::Redis, setup::Setup};
use crate::bench::program::quicksorts;
use crate::bench::world::cluster::this_program;
use crate::bench::world::process::{Guarded, describe, require};
use anyhow::{Context as _, bail, ensure};
use hecaton_memory::SplitMix;
use hecaton_policy::simulation::outcome::jain;
use std::{
    fs::{self, File},
    hash::{DefaultHasher, Hasher as _},
    io::{BufWriter, Read as _, Write as _},
    os::unix::process::ExitStatusExt as _,
    path::{Path, PathBuf},
    process::{Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

/// One run of a program that came to its end.
pub(super) struct Finished {
    pub(super) elapsed: Duration,
    /// Its largest resident memory; only of use where nothing limits it.
    pub(super) peak_bytes: u64,
    /// Jain's index of the times of several processes; `None` for a single process.
    pub(super) fairness: Option<f64>,
}

/// A run that did not.
pub(super) enum Outcome {
    Finished(Finished),
    /// Not within the time that a run is given.
    TooSlow,
    /// Killed by the kernel, which found no memory for it.
    OutOfMemory,
}

/// Derives the outcome of a failed run from its exit status; `None` if the process ended well.
pub(super) fn failure(name: &str, status: ExitStatus) -> anyhow::Result<Option<Outcome>> {
    // `hecaton run` tells its program's end as a shell does.
    if status.signal() == Some(SIGKILL) || status.code() == Some(128 + SIGKILL) {
        return Ok(Some(Outcome::OutOfMemory));
    }
    ensure!(status.success(), "`{name}` {}", describe(status));
    Ok(None)
}

/// Nobody but the kernel sends it to a program of this bench.
const SIGKILL: i32 = 9;

/// A program that can be run again and again under different limits.
pub(super) trait Program {
    fn name(&self) -> &'static str;

    /// Runs it once; an error if it fails or its result is wrong.
    fn run(&self, setup: &Setup<'_>, limit: Duration) -> anyhow::Result<Outcome>;
}

/// The programs' names, in the order in which they run.
pub(super) const NAMES: [&str; 8] = [
    "mbw",
    "sort",
    "redis",
    "quicksort",
    "quicksorts-1",
    "quicksorts-2",
    "quicksorts-4",
    "quicksorts-8",
];

/// Makes a program of about `bytes` of memory ready to run, with its input in `dir`.
pub(super) fn prepare(name: &str, bytes: u64, dir: &Path) -> anyhow::Result<Box<dyn Program>> {
    Ok(match name {
        "mbw" => Box::new(Mbw::new(bytes)?),
        "sort" => Box::new(Sort::new(bytes, dir)?),
        "redis" => Box::new(Redis::new(bytes, dir)?),
        "quicksort" => Box::new(Quicksort::new(bytes)?),
        "quicksorts-1" => Box::new(Quicksorts::new("quicksorts-1", 1, bytes)?),
        "quicksorts-2" => Box::new(Quicksorts::new("quicksorts-2", 2, bytes)?),
        "quicksorts-4" => Box::new(Quicksorts::new("quicksorts-4", 4, bytes)?),
        "quicksorts-8" => Box::new(Quicksorts::new("quicksorts-8", MOST_QUICKSORTS, bytes)?),
        _ => bail!("there is no program {name}"),
    })
}

fn run_to_end(name: &str, mut command: Command, limit: Duration) -> anyhow::Result<Outcome> {
    let start = Instant::now();
    let mut guarded = Guarded::spawn(&mut command)?;
    let Some(status) = guarded.wait_until(start + limit)? else { return Ok(Outcome::TooSlow) };
    let elapsed = start.elapsed();
    if let Some(outcome) = failure(name, status)? {
        return Ok(outcome);
    }
    Ok(Outcome::Finished(Finished { elapsed, peak_bytes: guarded.peak_bytes(), fairness: None }))
}

/// Copies one array into another, over and over: streaming reads and writes.
struct Mbw {
    mebibytes: u64,
}

impl Mbw {
    fn new(bytes: u64) -> anyhow::Result<Self> {
        require("mbw", "mbw")?;
        Ok(Self { mebibytes: (bytes >> 21).max(1) })
    }
}

impl Program for Mbw {
    fn name(&self) -> &'static str {
        "mbw"
    }

    fn run(&self, setup: &Setup<'_>, limit: Duration) -> anyhow::Result<Outcome> {
        let mut command = setup.command("mbw");
        command.args(["-q", "-t", "0", "-n", "5", &self.mebibytes.to_string()]);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        run_to_end(self.name(), command, limit)
    }
}

/// GNU sort, in memory, of lines of random text.
struct Sort {
    input: PathBuf,
    bytes: u64,
    /// Sum of the output of a first run without a limit, with which all other runs are compared.
    sum: u64,
}

impl Sort {
    fn new(bytes: u64, dir: &Path) -> anyhow::Result<Self> {
        // sort keeps the lines and 32 bytes about each, and half as many again while merging.
        let bytes = bytes / 10 * 9;
        let input = dir.join("lines");
        write_lines(&input, bytes)?;
        let mut sort = Self { input, bytes, sum: 0 };
        let output = Command::new("sort")
            .env("LC_ALL", "C")
            .arg(&sort.input)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start `sort`")?;
        sort.sum = sum_of(output.stdout.context("no output")?)?;
        Ok(sort)
    }
}

/// The sum of a stream, which depends on the order of its bytes.
fn sum_of(mut stream: impl std::io::Read) -> anyhow::Result<u64> {
    let mut hasher = DefaultHasher::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        match stream.read(&mut buffer)? {
            0 => return Ok(hasher.finish()),
            read => hasher.write(&buffer[..read]),
        }
    }
}

/// Lines of 64 to 960 random characters, as records in logs are: with shorter ones sort spends its
/// time on comparing, each a random access to two of them. Afterwards the file is in the page
/// cache, so that reading it costs every setup the same and is accounted to none.
pub(super) fn write_lines(path: &Path, bytes: u64) -> anyhow::Result<()> {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let file = File::create(path).with_context(|| format!("cannot make {}", path.display()))?;
    let mut file = BufWriter::with_capacity(1 << 20, file);
    let (mut random, mut written) = (SplitMix::new(bytes), 0);
    let mut line = Vec::with_capacity(1024);
    while written < bytes {
        line.clear();
        let length = 64 + random.draw() as usize % 897;
        while line.len() < length {
            let word = random.draw();
            line.extend((0..10).map(|at| ALPHABET[(word >> (6 * at)) as usize & 63]));
        }
        line.truncate(length);
        line.push(b'\n');
        file.write_all(&line)?;
        written += line.len() as u64;
    }
    file.into_inner()?.sync_all()?;
    Ok(())
}

impl Program for Sort {
    fn name(&self) -> &'static str {
        "sort"
    }

    fn run(&self, setup: &Setup<'_>, limit: Duration) -> anyhow::Result<Outcome> {
        let start = Instant::now();
        let mut command = setup.command("sort");
        command
            .env("LC_ALL", "C")
            .arg("--buffer-size")
            .arg((self.bytes * 4).to_string())
            .arg("--parallel=2")
            .arg(&self.input)
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        let mut guarded = Guarded::spawn(&mut command)?;
        let output = guarded.output()?;
        let sum = thread::spawn(move || sum_of(output));
        let Some(status) = guarded.wait_until(start + limit)? else { return Ok(Outcome::TooSlow) };
        let elapsed = start.elapsed();
        if let Some(outcome) = failure("sort", status)? {
            return Ok(outcome);
        }
        let sum = sum.join().expect("hashing does not panic")?;
        ensure!(sum == self.sum, "`sort` put out other lines than it should");
        Ok(Outcome::Finished(Finished {
            elapsed,
            peak_bytes: guarded.peak_bytes(),
            fairness: None,
        }))
    }
}

impl Drop for Sort {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.input);
    }
}

/// The MemX paper's application.
struct Quicksort {
    hecaton: PathBuf,
    count: u64,
}

impl Quicksort {
    fn new(bytes: u64) -> anyhow::Result<Self> {
        Ok(Self { hecaton: this_program()?, count: bytes / 8 })
    }
}

impl Program for Quicksort {
    fn name(&self) -> &'static str {
        "quicksort"
    }

    fn run(&self, setup: &Setup<'_>, limit: Duration) -> anyhow::Result<Outcome> {
        let hecaton = self.hecaton.to_str().context("the path of hecaton is not UTF-8")?;
        let mut command = setup.command(hecaton);
        command.args(["bench", "program", "quicksort", "--count", &self.count.to_string()]);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        run_to_end(self.name(), command, limit)
    }
}

/// As many as have `bench app`'s size together.
const MOST_QUICKSORTS: u64 = 8;

/// The same, several at a time on one client: each sorts as much, however many there are.
struct Quicksorts {
    name: &'static str,
    hecaton: PathBuf,
    processes: u64,
    count: u64,
}

impl Quicksorts {
    fn new(name: &'static str, processes: u64, bytes: u64) -> anyhow::Result<Self> {
        let count = bytes / MOST_QUICKSORTS / 8;
        Ok(Self { name, hecaton: this_program()?, processes, count })
    }
}

impl Program for Quicksorts {
    fn name(&self) -> &'static str {
        self.name
    }

    fn run(&self, setup: &Setup<'_>, limit: Duration) -> anyhow::Result<Outcome> {
        let mut command = setup.command(&self.hecaton);
        command
            .args(["bench", "program", "quicksorts", "--count", &self.count.to_string()])
            .args(["--processes", &self.processes.to_string()])
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        let start = Instant::now();
        let mut guarded = Guarded::spawn(&mut command)?;
        let mut output = guarded.output()?;
        let said = thread::spawn(move || {
            let mut said = String::new();
            output.read_to_string(&mut said).map(|_| said)
        });
        let Some(status) = guarded.wait_until(start + limit)? else { return Ok(Outcome::TooSlow) };
        let elapsed = start.elapsed();
        if let Some(outcome) = failure(self.name, status)? {
            return Ok(outcome);
        }
        let said = said.join().expect("reading does not panic")?;
        let report: quicksorts::Report = serde_json::from_str(&said)
            .with_context(|| format!("`{}` is not understood", self.name))?;
        let fairness = Some(jain(&report.elapsed_s));
        Ok(Outcome::Finished(Finished { elapsed, peak_bytes: report.peak_bytes, fairness }))
    }
}
