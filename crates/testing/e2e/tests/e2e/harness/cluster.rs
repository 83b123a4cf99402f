//! A cluster of the real `hecaton dev`, and programs on it.

use crate::harness::{
    process::{Ended, Running, kill_dead, run},
    wait::until,
};
use anyhow::{Context as _, anyhow, ensure};
use hecaton_memory::unix_time_ms;
use serde_json::Value;
use std::{
    env,
    ffi::OsString,
    fs,
    io::{BufRead as _, BufReader},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

/// Whether a consumer's or a volume's statistics were taken at this moment or later. The pager or
/// the volume's server reports to its node once a second, and the node to the manager.
pub(crate) fn is_since(stats: &Value, since_ms: u64) -> bool {
    stats["taken_at_ms"].as_u64() >= Some(since_ms)
}

/// How long anything may take that is not a program's own work. Shorter than a lease, so that
/// memory which only a lease's end brings back is found missing, unless `HECATON_TEST_PATIENCE`
/// scales it.
pub(crate) const PATIENCE: Duration = Duration::from_secs(50);

/// How long extents may stay away when whoever would have given them back was killed: the lease of
/// a space, and some time to notice its end.
pub(crate) const AFTER_LEASE: Duration = Duration::from_secs(100);

/// How long a program may take. Ten times what it takes on a slow machine: only a hang is longer.
pub(crate) const LONG: Duration = Duration::from_secs(300);

/// Options of a program or a volume: a donor may be silent for 1.5 s before other copies take its
/// place. One whose host is busy is not to be taken for gone, or the next failure would take the
/// last copy.
pub(crate) const PATIENT_WITH_DONORS: [&str; 2] = ["--failover", "1500"];

/// The built command: `HECATON`, or the one beside the test's own directory.
pub(crate) fn hecaton() -> anyhow::Result<PathBuf> {
    if let Some(path) = env::var_os("HECATON") {
        return Ok(path.into());
    }
    Ok(built()?.join("hecaton"))
}

fn built() -> anyhow::Result<PathBuf> {
    let test = env::current_exe()?;
    Ok(test.parent().and_then(Path::parent).context("the test is in no directory")?.to_owned())
}

/// Fails if the command or its library is not built: a run of this package alone builds neither.
pub(crate) fn check_built() -> anyhow::Result<()> {
    if env::var_os("HECATON").is_some() {
        return Ok(());
    }
    for name in ["hecaton", "libhecaton.so"] {
        let path = built()?.join(name);
        ensure!(
            path.is_file(),
            "{} is not built; run the tests of the whole workspace, with a filter: \
             cargo nextest run -E 'test(NAME)'",
            path.display()
        );
    }
    Ok(())
}

/// Log file of a cluster's daemons, in the directory of the cluster.
const LOG: &str = "log";

/// A directory for a cluster. It stays until the world ends: the logs of a test that fails are in
/// it.
pub(crate) fn scratch() -> anyhow::Result<tempfile::TempDir> {
    // A short name: sockets are in it.
    let scratch = tempfile::Builder::new().prefix("").disable_cleanup(true).tempdir()?;
    // A prefix may run commands as another user, who must be able to write here.
    fs::set_permissions(scratch.path(), fs::Permissions::from_mode(0o777))?;
    Ok(scratch)
}

/// A host's own directory.
pub(crate) fn at_host(runtime: &Path, host: usize) -> anyhow::Result<PathBuf> {
    let directory = runtime.join(format!("host-{host}"));
    fs::create_dir_all(&directory)?;
    Ok(directory)
}

/// Where a daemon is to log.
pub(crate) fn log_in(scratch: &tempfile::TempDir) -> anyhow::Result<fs::File> {
    Ok(fs::File::options().create(true).append(true).open(scratch.path().join(LOG))?)
}

/// Waits for a condition of a cluster's status, which may be out of reach for a while.
pub(crate) fn eventually(
    status: impl Fn() -> anyhow::Result<Value>,
    what: &str,
    limit: Duration,
    condition: impl Fn(&Value) -> anyhow::Result<bool>,
) -> anyhow::Result<()> {
    until(what, limit, || match status() {
        Ok(status) => Ok(if condition(&status)? { Ok(()) } else { Err(in_short(&status)) }),
        Err(error) => Ok(Err(format!("{error:#}"))),
    })
}

/// Waits until the manager has answered a heartbeat of each of these nodes that came after this was
/// called. The answer tells a node of the donors of the others.
pub(crate) fn until_heartbeats(
    status: impl Fn() -> anyhow::Result<Value>,
    nodes: &[&str],
) -> anyhow::Result<()> {
    let since_ms = status()?["uptime_ms"].as_u64().context("the status has no uptime")?;
    eventually(status, "the nodes know the donors of the others", PATIENCE, |status| {
        let now_ms = status["uptime_ms"].as_u64().context("the status has no uptime")?;
        let is_heard = |name: &&str| {
            let mut all = status["nodes"].as_array().into_iter().flatten();
            let node = all.find(|node| node["name"] == **name);
            let silent_ms = node.and_then(|node| node["silent_ms"].as_u64());
            silent_ms.is_some_and(|silent_ms| now_ms.saturating_sub(silent_ms) > since_ms)
        };
        Ok(nodes.iter().all(is_heard))
    })
}

/// A cluster; it is stopped when it goes out of scope.
pub(crate) struct Cluster {
    pub(crate) hecaton: PathBuf,
    pub(crate) url: String,
    /// Words at the start of every command line.
    prefix: Vec<OsString>,
    /// The node that commands start programs through. Before the directory that it is in.
    node: Running,
    scratch: tempfile::TempDir,
}

impl Cluster {
    pub(crate) fn start(donors: u32, lend: &str) -> anyhow::Result<Self> {
        Self::start_as(Vec::new(), donors, lend)
    }

    /// The same, and all commands on it, with `prefix` before each.
    pub(crate) fn start_as(prefix: Vec<OsString>, donors: u32, lend: &str) -> anyhow::Result<Self> {
        Self::start_with(prefix, donors, lend, &[])
    }

    /// The same, with further arguments for the cluster.
    pub(crate) fn start_with(
        prefix: Vec<OsString>,
        donors: u32,
        lend: &str,
        arguments: &[String],
    ) -> anyhow::Result<Self> {
        let scratch = scratch()?;
        let dir = scratch.path().join("node");
        let mut dev = Running::spawn(
            prefixed(&prefix, &hecaton()?)
                .args(["dev", "--json", "--donors", &donors.to_string(), "--lend", lend, "--dir"])
                .arg(&dir)
                .args(arguments)
                .env_remove("HECATON_MANAGER")
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .stderr(log_in(&scratch)?),
        )?;
        let ready = ready_line(&mut dev).map_err(|_| {
            let log = fs::read_to_string(scratch.path().join(LOG)).unwrap_or_default();
            anyhow!("`hecaton dev` does not come up: {}", log.trim())
        })?;
        let url = ready["manager"].as_str().context("the cluster has no manager")?.to_owned();
        let cluster = Self::of(url, prefix, dev, scratch)?;
        cluster.wait_for_donors(donors as usize)?;
        Ok(cluster)
    }

    /// The cluster of a manager and nodes that were started one by one. Programs are started
    /// through `node`; it and the others log to [`log_in`] the same directory.
    pub(crate) fn of(
        url: String,
        prefix: Vec<OsString>,
        node: Running,
        scratch: tempfile::TempDir,
    ) -> anyhow::Result<Self> {
        Ok(Self { hecaton: hecaton()?, url, prefix, node, scratch })
    }

    pub(crate) fn wait_for_donors(&self, count: usize) -> anyhow::Result<()> {
        self.eventually("all donors serve", PATIENCE, |status| {
            let donors_up = all(status, "donors").filter(|donor| donor["state"] == "serving");
            Ok(donors_up.count() == count)
        })
    }

    /// Tries the smallest program; the command's own words are the reason if this machine does not
    /// let page faults be handled.
    pub(crate) fn check_userfaultfd(&self) -> Result<(), String> {
        match run(&mut self.on_pool("64M", "true"), PATIENCE) {
            Ok(ended) if ended.stderr.contains("userfaultfd") => {
                Err(ended.stderr.trim().to_owned())
            }
            // Anything else is for the tests to find.
            _ => Ok(()),
        }
    }

    /// The process of the node, which is the manager, too.
    pub(crate) fn node(&self) -> u32 {
        self.node.id()
    }

    /// SIGKILL for it.
    pub(crate) fn kill_node(&self) {
        kill_dead(self.node.id());
    }

    /// A directory for a test's programs to write to.
    pub(crate) fn dir(&self, name: &str) -> anyhow::Result<PathBuf> {
        let dir = self.file(name);
        fs::create_dir_all(&dir)?;
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o777))?;
        Ok(dir)
    }

    /// A place for a test's files.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    /// Where a further daemon is to log.
    pub(crate) fn log(&self) -> anyhow::Result<fs::File> {
        log_in(&self.scratch)
    }

    /// The end of what the cluster's processes logged.
    pub(crate) fn log_tail(&self) -> String {
        let log = fs::read_to_string(self.scratch.path().join(LOG)).unwrap_or_default();
        let lines: Vec<_> = log.lines().collect();
        lines[lines.len().saturating_sub(12)..].join("\n    ")
    }

    pub(crate) fn command(&self, subcommand: &str) -> Command {
        let mut command = prefixed(&self.prefix, &self.hecaton);
        command.arg(subcommand).env("HECATON_MANAGER", &self.url).stdin(Stdio::null());
        command
    }

    /// `hecaton run --local LOCAL -- PROGRAM`, ready for the program's arguments.
    pub(crate) fn on_pool(&self, local: &str, program: impl AsRef<Path>) -> Command {
        let mut command = self.command("run");
        command.args(["--local", local, "--"]).arg(program.as_ref());
        command
    }

    /// Output of `hecaton status --json`.
    pub(crate) fn status(&self) -> anyhow::Result<Value> {
        self.status_from(&self.prefix)
    }

    /// Output of `hecaton status --json` where a command line with this prefix runs.
    pub(crate) fn status_from(&self, prefix: &[OsString]) -> anyhow::Result<Value> {
        let mut command = prefixed(prefix, &self.hecaton);
        command.args(["status", "--json"]).env("HECATON_MANAGER", &self.url).stdin(Stdio::null());
        let ended = run(&mut command, PATIENCE)?;
        ended.expect_success("hecaton status --json")?;
        serde_json::from_slice(&ended.stdout).context("the status is no JSON")
    }

    /// Looks at the cluster's status until nothing is missing. `look` says what it misses.
    pub(crate) fn until_status(
        &self,
        what: &str,
        limit: Duration,
        mut look: impl FnMut(&Value) -> Result<(), String>,
    ) -> anyhow::Result<()> {
        until(what, limit, || {
            let status = self.status().map_err(|error| format!("{error:#}"));
            Ok(status.and_then(|status| look(&status)))
        })
    }

    /// Waits for a condition of the cluster's status.
    pub(crate) fn eventually(
        &self,
        what: &str,
        limit: Duration,
        condition: impl Fn(&Value) -> anyhow::Result<bool>,
    ) -> anyhow::Result<()> {
        eventually(|| self.status(), what, limit, condition)
    }

    /// Nothing borrows, and the donors have all of their memory back.
    pub(crate) fn wait_until_idle(&self, limit: Duration) -> anyhow::Result<()> {
        self.eventually("all extents are back in the pool", limit, |status| {
            let consumers = all(status, "consumers").count();
            let mut held = 0;
            for donor in all(status, "donors") {
                // One that has just come has not told yet.
                let Ok(lent) = lent_pages(donor) else { return Ok(false) };
                held += lent;
            }
            Ok(consumers == 0 && held == 0)
        })
    }

    /// The process of one of the donors.
    pub(crate) fn donor(&self, index: usize) -> anyhow::Result<u32> {
        let status = self.status()?;
        let pid = all(&status, "donors").nth(index).and_then(|donor| donor["pid"].as_u64());
        Ok(u32::try_from(pid.context("the donor has no process")?)?)
    }

    /// The process of the only consumer's pager, as soon as the node has told of it.
    pub(crate) fn pager_of_only_consumer(&self) -> anyhow::Result<u32> {
        until("the pager of the only consumer is told of", PATIENCE, || {
            Ok(self.known_pager()?.ok_or("there is not one consumer with a pager"))
        })
    }

    /// The process of the only consumer's pager, if the node has told of it. For a moment after a
    /// program has begun, or a pager has ended, it has not.
    pub(crate) fn known_pager(&self) -> anyhow::Result<Option<u32>> {
        let status = self.status()?;
        let pids: Vec<_> = all(&status, "consumers").map(|one| one["pid"].as_u64()).collect();
        match pids[..] {
            [Some(pid)] => Ok(Some(u32::try_from(pid)?)),
            _ => Ok(None),
        }
    }
}

/// The line of JSON by which a daemon says that it is ready.
pub(crate) fn ready_line(daemon: &mut Running) -> anyhow::Result<Value> {
    let mut line = String::new();
    let output = daemon.output()?;
    BufReader::new(output).read_line(&mut line)?;
    serde_json::from_str(&line).with_context(|| format!("not ready, but `{line}`"))
}

fn prefixed(prefix: &[OsString], program: &Path) -> Command {
    let mut words = prefix.iter().map(OsString::as_os_str).chain([program.as_os_str()]);
    let mut command = Command::new(words.next().expect("there is the program at least"));
    command.args(words);
    command
}

/// The entries of one kind, of all nodes.
pub(crate) fn all<'a>(status: &'a Value, kind: &'a str) -> impl Iterator<Item = &'a Value> {
    let nodes = status["nodes"].as_array().into_iter().flatten();
    nodes.flat_map(move |node| node[kind].as_array().into_iter().flatten())
}

/// Consumers and lent pages of a status, in one line: the whole status fills screens.
fn in_short(status: &Value) -> String {
    let name = |one: &Value| one["name"].as_str().unwrap_or("?").to_owned();
    let consumers: Vec<_> =
        all(status, "consumers").map(|one| format!("{} ({})", name(one), one["state"])).collect();
    let mut lent = Vec::new();
    for donor in all(status, "donors") {
        let pages = lent_pages(donor).map_or("?".to_owned(), |pages| pages.to_string());
        let told = &donor["stats"]["told_limit_bytes"];
        let state = &donor["state"];
        lent.push(format!("{} {state} lends {pages} pages, told {told}", name(donor)));
        for space in donor["stats"]["spaces"].as_array().into_iter().flatten() {
            if space["extents"].as_u64() > Some(0) {
                let (pages, silent_ms) = (&space["pages"], &space["silent_ms"]);
                lent.push(format!("{pages} to {}, silent for {silent_ms} ms", space["consumer"]));
            }
        }
    }
    format!("consumers: [{}]; {}", consumers.join(", "), lent.join(", "))
}

/// Pages of a donor that are lent out, or on their way back.
fn lent_pages(donor: &Value) -> anyhow::Result<u64> {
    let pages = |name: &str| donor["stats"][name].as_u64();
    let lent = pages("lent_pages").zip(pages("leaving_pages"));
    let (lent, leaving) =
        lent.with_context(|| format!("the donor does not say what it has lent: {donor}"))?;
    Ok(lent + leaving)
}

/// Repeats a command that a volume refuses while somebody uses it. Its server, or the kernel, sees
/// the end of a client a moment after the client has ended. Any other refusal is an error.
pub(crate) fn when_unused(
    limit: Duration,
    command: impl Fn() -> anyhow::Result<Ended>,
) -> anyhow::Result<()> {
    until("nobody uses the volume", limit, || {
        let ended = command()?;
        let is_in_use = ended.stderr.contains("is in use");
        ensure!(ended.status.success() || is_in_use, "it was refused: {}", ended.stderr);
        Ok(if is_in_use { Err(ended.stderr) } else { Ok(()) })
    })
}

/// Starts a program that writes to a volume, and waits until the volume's `status` tells of its
/// writes.
pub(crate) fn start_writing(
    command: &mut Command,
    status: impl Fn() -> anyhow::Result<Value>,
) -> anyhow::Result<Running> {
    let written = |status: &Value| status["stats"]["written_bytes"].as_u64();
    let since_ms = unix_time_ms();
    let before = until("the volume tells what others have written", PATIENCE, || {
        let now = status()?;
        let is_new = is_since(&now["stats"], since_ms);
        Ok(written(&now).filter(|_| is_new).ok_or(now))
    })?;
    let mut running = Running::spawn(command)?;
    until("the program writes to the volume", PATIENCE, || {
        ensure!(running.child_mut().try_wait()?.is_none(), "the program has ended");
        let now = status()?;
        Ok(if written(&now) > Some(before) { Ok(()) } else { Err(now) })
    })?;
    Ok(running)
}

/// The outcome of a program that must succeed.
pub(crate) fn succeed(command: &mut Command) -> anyhow::Result<Ended> {
    let ended = run(command, LONG)?;
    ended.expect_success(&format!("{command:?}"))?;
    Ok(ended)
}
