//! Hosts that fail: each in a network namespace of its own, with its own node. Their processes are
//! killed and stopped, and the hosts cut off, while programs use their memory.

mod program;

use self::program::Program;
use crate::{
    harness::{
        Outcome, TestResult,
        cluster::{
            Cluster, LONG, PATIENCE, PATIENT_WITH_DONORS, all, at_host, hecaton, log_in,
            ready_line, scratch, until_heartbeats,
        },
        fio::{end_fio, fio_verify, no_fio},
        process::{Running, Stopped, kill_dead, missing, missing_any, run, signal},
        wait::until,
        whole::{is_missing, used_donors, users},
    },
    programs::write_lines,
    redis::Redis,
    volume::Disk,
};
use anyhow::{Context as _, ensure};
use hecaton_e2e::Random;
use hecaton_netns::{Cut, NetError, Network, cluster};
use rustix::process::Signal;
use serde_json::Value;
use std::{
    cell::RefCell,
    collections::BTreeMap,
    env, fs,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    path::{Path, PathBuf},
    process::{ChildStdin, ChildStdout, Command, Stdio},
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    thread,
    time::Duration,
};

/// Where the programs run. It lends nothing.
const BORROWER: usize = 0;
/// Hosts that lend in a small cluster.
const DONORS: [usize; 3] = [1, 2, 3];
/// Hosts that may lend in a large one.
const MANY: usize = 20;

const LEND_BYTES: u64 = 400 << 20;

/// The shortest lease that `hecaton run` takes, in seconds.
const LEASE: &str = "8";

/// How long extents may stay after it has run out unnoticed.
const AFTER_SHORT_LEASE: Duration = Duration::from_secs(20);

/// So long [`PATIENT_WITH_DONORS`] lets a donor be silent.
const FAILOVER: Duration = Duration::from_millis(1500);

/// So long after a donor came back, each request that had waited for it is answered or given up.
const AFTER_OUTAGE: Duration = FAILOVER.saturating_mul(2);

/// A cluster of one borrower, three donors and the manager, each on its host.
struct Hosts {
    // Dropped in this order: nodes, then the manager, then the hosts.
    donors: RefCell<BTreeMap<usize, Running>>,
    cluster: Cluster,
    runtime: PathBuf,
    _manager: Running,
    network: Network,
    /// The manager's host. All between it and the borrower may lend.
    manager: usize,
}

impl Hosts {
    /// The hosts, `donors` of which lend, and up to `room` may later; or why there are none here.
    fn start(donors: &[usize], room: usize) -> anyhow::Result<Result<Hosts, String>> {
        let manager_host = room + 1;
        if let Some(reason) = missing("nsenter") {
            return Ok(Err(reason));
        }
        let network = match Network::new(manager_host + 1) {
            Ok(network) => network,
            Err(error @ (NetError::NotPermitted(_) | NetError::Missing { .. })) => {
                return Ok(Err(format!("no network namespaces: {error}")));
            }
            Err(error) => return Err(error.into()),
        };
        let scratch = scratch()?;
        let runtime = scratch.path().to_owned();
        let mut command = cluster::manager(
            &hecaton()?,
            network.host(manager_host),
            &at_host(&runtime, manager_host)?,
        );
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log_in(&scratch)?);
        let mut manager = Running::spawn(&mut command)?;
        ready_line(&mut manager)?;
        let node = |host| start_node(&network, &runtime, host, manager_host, log_in(&scratch)?);
        let lend = |host: &usize| Ok((*host, node(*host)?));
        let lending = donors.iter().map(lend).collect::<anyhow::Result<BTreeMap<_, _>>>()?;
        let borrower = node(BORROWER)?;
        let url = cluster::manager_url(network.host(manager_host));
        let prefix = cluster::prefix(network.host(BORROWER), &at_host(&runtime, BORROWER)?);
        let cluster = Cluster::of(url, prefix, borrower, scratch)?;
        let hosts = Hosts {
            donors: RefCell::new(lending),
            cluster,
            runtime,
            _manager: manager,
            network,
            manager: manager_host,
        };
        hosts.cluster.wait_for_donors(donors.len())?;
        until_heartbeats(|| hosts.cluster.status(), &[&*hosts.network.host(BORROWER).name()])?;
        Ok(Ok(hosts))
    }

    /// Entry of a host's node in the status; null if the status has none.
    fn node<'a>(&self, status: &'a Value, host: usize) -> &'a Value {
        let name = self.network.host(host).name();
        let mut nodes = status["nodes"].as_array().into_iter().flatten();
        nodes.find(|node| node["name"] == *name).unwrap_or(&Value::Null)
    }

    /// A program that verifies what it reads, and goes on until it is told to end.
    fn verifier(&self, name: &str, options: &[&str]) -> anyhow::Result<Program> {
        let mut command = self.cluster.command("run");
        command.args(["--local", "16M", "--name", name]).args(two_copies()).args(options).arg("--");
        command.arg(env!("CARGO_BIN_EXE_verify-threads")).args(["1", "12000"]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut running = Running::spawn(&mut command)?;
        let output = running.output()?;
        let mut program = Program { running, output, name: name.to_owned() };
        let started = self.cluster.eventually("the program uses the pool", PATIENCE, |status| {
            Ok(program.pool(status)["extents_bytes"].as_u64() > Some(32 << 20))
        });
        started.or_else(|error| program.expect_running().and(Err(error)))?;
        self.cluster.until_whole_after(Duration::ZERO, &[name])?;
        Ok(program)
    }

    /// Waits until every program and volume that has pages at a host's donor misses it. An outage
    /// that nobody has noticed is no failure yet: pages with one copy would count as whole.
    fn until_missed(&self, host: usize) -> anyhow::Result<()> {
        self.until_used_only_if(is_missing, "whoever has pages there misses it", host)
    }

    /// Waits until no program has pages at a donor that is gone for good.
    fn until_replaced(&self, host: usize) -> anyhow::Result<()> {
        self.until_used_only_if(|_| false, "nobody has pages there any more", host)
    }

    /// Waits until this holds of a host's donor, as each program and volume with pages there knows
    /// it.
    fn until_used_only_if(
        &self,
        condition: fn(&Value) -> bool,
        what: &str,
        host: usize,
    ) -> anyhow::Result<()> {
        let donor = self.network.host(host).name();
        self.cluster.eventually(&format!("{donor}: {what}"), PATIENCE, |status| {
            let is_so = |user: &Value| {
                let mut used = used_donors(&user["stats"]);
                !user["stats"].is_null() && used.all(|one| one["name"] != *donor || condition(one))
            };
            Ok(users(status).all(is_so))
        })
    }

    /// Waits until the manager has not heard the borrower for [`AFTER_OUTAGE`]. Nothing can be
    /// asked at the borrower while it is cut off.
    fn until_borrower_is_unheard(&self) -> anyhow::Result<()> {
        let prefix = self.network.host(self.manager).namespace().prefix();
        until("the manager does not hear the borrower", PATIENCE, || {
            let status = self.cluster.status_from(&prefix)?;
            let silent_ms = self.node(&status, BORROWER)["silent_ms"].as_u64();
            let is_long = silent_ms >= Some(AFTER_OUTAGE.as_millis() as u64);
            Ok(if is_long { Ok(()) } else { Err(format!("silent for {silent_ms:?} ms")) })
        })
    }

    /// The donor's process.
    fn donor(&self, host: usize) -> anyhow::Result<u32> {
        let status = self.cluster.status()?;
        let pid = self.node(&status, host)["donors"][0]["pid"].as_u64();
        Ok(u32::try_from(pid.context("the donor has no process")?)?)
    }

    /// Kills the node, and with it its donor and all memory that it had lent.
    fn kill_node(&self, host: usize) -> anyhow::Result<()> {
        let donor = self.donor(host)?;
        let mut node = self.donors.borrow_mut().remove(&host).context("no node is there")?;
        kill_dead(node.id());
        kill_dead(donor);
        node.wait(PATIENCE, || Ok(()))?;
        Ok(())
    }

    /// A node on a host that has none, or had one that was killed.
    fn start_donor(&self, host: usize) -> anyhow::Result<()> {
        let start = || {
            let log = self.cluster.log()?;
            start_node(&self.network, &self.runtime, host, self.manager, log)
        };
        let mut node = start()?;
        until(&format!("a node serves on host {host} again"), PATIENCE, || {
            // The manager refuses it as long as it takes the one before for alive: five seconds.
            if let Some(ended) = node.child_mut().try_wait()? {
                node = start()?;
                return Ok(Err(format!("it ended with {ended}")));
            }
            let status = self.cluster.status()?;
            let reported = self.node(&status, host);
            let serves = reported["donors"][0]["state"] == "serving";
            let is_it = serves && reported["pid"].as_u64() == Some(node.id().into());
            Ok(if is_it { Ok(()) } else { Err(format!("the manager knows {reported}")) })
        })?;
        self.donors.borrow_mut().insert(host, node);
        Ok(())
    }

    /// Empties a host's donor.
    fn drain(&self, host: usize) -> anyhow::Result<()> {
        let name = self.network.host(host).name();
        let mut drain = self.cluster.command("node");
        let ended = run(drain.args(["drain", &name, "--json", "--deadline", "60"]), LONG)?;
        ended.expect_success("hecaton node drain")?;
        let outcome: Value = serde_json::from_slice(&ended.stdout)?;
        ensure!(outcome["left_bytes"] == 0, "{outcome}");
        Ok(())
    }

    /// Empties a host's donor and ends its node in an orderly way.
    fn leave(&self, host: usize) -> anyhow::Result<()> {
        self.drain(host)?;
        let mut node = self.donors.borrow_mut().remove(&host).context("no node is there")?;
        signal(node.id(), Signal::TERM);
        let ended = node.wait(PATIENCE, || Ok(()))?;
        ensure!(ended.success(), "the node of host {host} ended with {ended}");
        Ok(())
    }

    /// One of the hosts that lend, or of those that could.
    fn some_host(&self, lends: bool, random: &mut Random) -> usize {
        let lending = self.donors.borrow();
        let fitting = (1..self.manager).filter(|host| lending.contains_key(host) == lends);
        let fitting: Vec<usize> = fitting.collect();
        fitting[random.below(fitting.len())]
    }

    /// One donor after the other is killed, stopped, cut off in every way, loses its memory and is
    /// drained, and the borrower is cut off itself. Each time these programs and volumes have all
    /// copies again before the next one fails, and `check` is called.
    fn fail_one_after_another(
        &self,
        names: &[&str],
        check: &mut dyn FnMut() -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let [first, second, third] = DONORS;
        let mut until_whole = |after: &str| {
            let whole = self.cluster.until_whole_after(AFTER_OUTAGE, names);
            whole.and_then(|()| check()).with_context(|| after.to_owned())
        };
        until_whole("at first")?;
        kill_dead(self.donor(first)?);
        until_whole("killed")?;

        let stopped = Stopped::stop(self.donor(second)?);
        self.until_missed(second)?;
        drop(stopped);
        until_whole("stopped")?;

        for (host, cut) in [(third, Cut::Off), (first, Cut::Deaf), (second, Cut::Mute)] {
            let outage = self.network.cut(host, cut)?;
            self.until_missed(host)?;
            outage.heal()?;
            until_whole(&format!("{cut:?}"))?;
        }

        self.kill_node(third)?;
        self.until_missed(third)?;
        self.start_donor(third)?;
        until_whole("back without its memory")?;

        // It finds everything when it is back within its lease.
        let outage = self.network.cut(BORROWER, Cut::Off)?;
        self.until_borrower_is_unheard()?;
        outage.heal()?;
        until_whole("the borrower cut off")?;

        self.drain(first)?;
        until_whole("drained")
    }

    /// The beginning of a command line on the pool, with two copies.
    fn on_pool(&self, name: &str) -> Command {
        let mut command = self.cluster.command("run");
        command.args(["--local", "16M", "--name", name]).args(two_copies()).arg("--");
        command
    }
}

/// Options of a program or a volume.
fn two_copies() -> [&'static str; 4] {
    let [failover, after_ms] = PATIENT_WITH_DONORS;
    ["--mirror", "2", failover, after_ms]
}

fn start_node(
    network: &Network,
    runtime: &Path,
    host: usize,
    manager: usize,
    log: fs::File,
) -> anyhow::Result<Running> {
    let lend = (host != BORROWER).then_some(LEND_BYTES);
    let directory = at_host(runtime, host)?;
    let manager = network.host(manager);
    let mut command = cluster::node(&hecaton()?, network.host(host), &directory, manager, lend);
    Running::spawn(command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log))
}

/// With two copies, neither the program nor the client of the volume ever notices.
pub(crate) fn they_fail_one_after_another() -> TestResult {
    let hosts = match Hosts::start(&DONORS, DONORS.len())? {
        Ok(hosts) => hosts,
        Err(reason) => return Ok(Outcome::Skipped(reason)),
    };
    if let Some(reason) = no_fio()? {
        return Ok(Outcome::Skipped(reason));
    }
    let program = hosts.verifier("verifier", &[])?;
    let disk = Disk::create(&hosts.cluster, "disk", "128M", &two_copies())?;
    let mut fio = fio_verify(&disk.uri(), hosts.cluster.log()?);
    let mut fio = Running::spawn(&mut fio)?;
    hosts.fail_one_after_another(&["verifier", "disk"], &mut || {
        let ended = fio.child_mut().try_wait()?;
        ensure!(ended.is_none(), "fio has ended with {ended:?}");
        Ok(())
    })?;

    end_fio(&mut fio)?;
    let stats = disk.stats()?;
    ensure!(stats["errors"] == 0, "{stats}");
    disk.delete()?;
    let pool = program.pool(&hosts.cluster.status()?).clone();
    ensure!(pool["copied_bytes"].as_u64() > Some(0), "no copy was ever made anew: {pool}");
    program.has_verified(&hosts.cluster)?;
    hosts.cluster.wait_until_idle(PATIENCE)?;
    Ok(Outcome::Passed)
}

/// `stress-ng` maps, unmaps and tests memory all the time, and never notices the failures.
pub(crate) fn stress_ng_outlives_them() -> TestResult {
    if let Some(reason) = missing("stress-ng") {
        return Ok(Outcome::Skipped(reason));
    }
    let hosts = match Hosts::start(&DONORS, DONORS.len())? {
        Ok(hosts) => hosts,
        Err(reason) => return Ok(Outcome::Skipped(reason)),
    };
    let mut stress = hosts.on_pool("stress-ng");
    stress.args(["stress-ng", "--vm", "1", "--vm-bytes", "64M", "--verify", "--vm-method", "all"]);
    stress.args(["--timeout", "0"]).stdin(Stdio::null()).stdout(Stdio::null());
    let mut stress = Running::spawn(stress.stderr(Stdio::piped()))?;

    hosts.fail_one_after_another(&["stress-ng"], &mut || Ok(()))?;
    let status = hosts.cluster.status()?;
    let astray = all(&status, "consumers").map(|one| &one["stats"]["unexpected_missing"]);
    ensure!(astray.eq([0]), "pages were not where they were known to be: {status}");
    signal(stress.id(), Signal::INT);
    let ended = stress.wait(LONG, || Ok(()))?;
    let mut said = String::new();
    stress.child_mut().stderr.take().context("no errors")?.read_to_string(&mut said)?;
    ensure!(ended.success() && !said.contains("fail:"), "stress-ng ended with {ended}: {said}");
    hosts.cluster.wait_until_idle(PATIENCE)?;
    Ok(Outcome::Passed)
}

/// `sort` and a Redis server, both unmodified, never notice the failures either.
pub(crate) fn programs_outlive_them() -> TestResult {
    if let Some(reason) = missing_any(&["sort", "redis-server"]) {
        return Ok(Outcome::Skipped(reason));
    }
    let hosts = match Hosts::start(&DONORS, DONORS.len())? {
        Ok(hosts) => hosts,
        Err(reason) => return Ok(Outcome::Skipped(reason)),
    };
    let cluster = &hosts.cluster;

    let (lines, sorted) = (cluster.file("lines"), cluster.file("sorted"));
    write_lines(&lines, 300_000)?;
    let mut sort = Command::new("sort");
    run(sort.env("LC_ALL", "C").arg(&lines).arg("-o").arg(&sorted), LONG)?
        .expect_success("sort")?;
    let mut sorting = hosts.on_pool("sort");
    let script =
        "while read -r go; do sort -S 200M \"$1\" | cmp - \"$2\" || exit 1; echo sorted; done";
    sorting.env("LC_ALL", "C").args(["sh", "-c", script, "sh"]).args([&lines, &sorted]);
    let mut sorting = Running::spawn(sorting.stdin(Stdio::piped()).stdout(Stdio::piped()))?;
    let asked = sorting.child_mut().stdin.take().context("no input")?;
    let answers = sorting.output()?;

    let mut redis_server = hosts.on_pool("redis");
    redis_server.arg("redis-server");
    let mut redis = Redis::start(redis_server, &cluster.dir("redis")?)?;

    let is_over = AtomicBool::new(false);
    let (sorts, sets) = thread::scope(|scope| -> anyhow::Result<(u64, u64)> {
        let sorts = scope.spawn(|| sort_until(&is_over, asked, answers));
        let sets = scope.spawn(|| set_until(&is_over, &mut redis));
        let failed = hosts.fail_one_after_another(&["sort", "redis"], &mut || Ok(()));
        is_over.store(true, Relaxed);
        let (sorts, sets) = (sorts.join(), sets.join());
        let told = |_| anyhow::anyhow!("a client panicked");
        let (sorts, sets) = (sorts.map_err(told)??, sets.map_err(told)??);
        failed.map(|()| (sorts, sets))
    })?;
    ensure!(sorts > 1 && sets > 1000, "{sorts} files sorted, {sets} keys set");

    redis.shut_down()?;
    let ended = sorting.wait(LONG, || Ok(()))?;
    ensure!(ended.success(), "sort ended with {ended}");
    cluster.wait_until_idle(PATIENCE)?;
    Ok(Outcome::Passed)
}

/// Has the same file sorted again and again; how often it came out right.
fn sort_until(
    is_over: &AtomicBool,
    mut asked: ChildStdin,
    answers: ChildStdout,
) -> anyhow::Result<u64> {
    let mut sorts = 0;
    let mut answers = BufReader::new(answers).lines();
    while !is_over.load(Relaxed) {
        writeln!(asked)?;
        let answer = answers.next().transpose()?;
        ensure!(answer.as_deref() == Some("sorted"), "sort said {answer:?}");
        sorts += 1;
    }
    Ok(sorts)
}

/// Sets keys and reads others that were set before; at the end, all of them.
fn set_until(is_over: &AtomicBool, redis: &mut Redis) -> anyhow::Result<u64> {
    let mut generations = vec![0; 40_000];
    for key in 0..generations.len() {
        redis.set(key, 0)?;
    }
    let mut random = Random(11);
    let mut sets = 0;
    while !is_over.load(Relaxed) {
        let (one, other) = (random.below(generations.len()), random.below(generations.len()));
        generations[one] += 1;
        redis.set(one, generations[one])?;
        redis.expect(other, generations[other])?;
        sets += 1;
    }
    for (key, generation) in generations.iter().enumerate() {
        redis.expect(key, *generation)?;
    }
    Ok(sets)
}

/// When both donors of a segment are gone, the program is ended with the segment's, the space's and
/// a donor's name, and has seen no wrong byte until then.
pub(crate) fn both_copies_are_lost() -> TestResult {
    let hosts = match Hosts::start(&DONORS, DONORS.len())? {
        Ok(hosts) => hosts,
        Err(reason) => return Ok(Outcome::Skipped(reason)),
    };
    let [first, second, third] = DONORS;

    // They come back empty. Each segment has its copies at these two.
    let program = hosts.verifier("loser", &["--lease", LEASE, "--donors", "host-1,host-2"])?;
    hosts.kill_node(first)?;
    hosts.kill_node(second)?;
    hosts.start_donor(first)?;
    hosts.start_donor(second)?;
    program.was_ended_because(&["is lost with donor host-1", "is lost with donor host-2"])?;
    hosts.cluster.wait_until_idle(AFTER_SHORT_LEASE)?;

    // They do not come back in time.
    let options = ["--lease", LEASE, "--donor-patience", "3", "--donors", "host-2,host-3"];
    let program = hosts.verifier("waiter", &options)?;
    let outages = [hosts.network.cut(second, Cut::Off)?, hosts.network.cut(third, Cut::Off)?];
    program.was_ended_because(&[
        "donor host-2 has not answered for",
        "donor host-3 has not answered for",
    ])?;
    for outage in outages {
        outage.heal()?;
    }
    hosts.cluster.wait_until_idle(AFTER_SHORT_LEASE)?;
    Ok(Outcome::Passed)
}

/// A pager and a donor are stopped until the lease has run out and the memory is another program's.
/// When they go on, neither does harm: the pager's program is ended, the other one reads what it
/// has written.
pub(crate) fn who_outsleeps_the_lease_is_fenced() -> TestResult {
    let hosts = match Hosts::start(&DONORS, DONORS.len())? {
        Ok(hosts) => hosts,
        Err(reason) => return Ok(Outcome::Skipped(reason)),
    };
    let sleeper = hosts.verifier("sleeper", &["--lease", LEASE])?;
    let awake = hosts.verifier("awake", &["--lease", LEASE])?;
    let [stopped, ..] = DONORS;
    let asleep = [hosts.donor(stopped)?, sleeper.pager(&hosts.cluster)?].map(Stopped::stop);
    hosts.cluster.eventually("the sleeper's lease has run out", AFTER_SHORT_LEASE, |status| {
        Ok(sleeper.lent_by(DONORS.len() - 1, &hosts.network.host(stopped).name(), status)
            == Some(0))
    })?;
    // Its extents become theirs.
    let heir = hosts.verifier("heir", &["--lease", LEASE])?;
    drop(asleep);

    sleeper.was_ended_because(&["is lost with donor"])?;
    hosts.cluster.until_whole_after(Duration::ZERO, &["awake"])?;
    awake.has_verified(&hosts.cluster)?;
    heir.has_verified(&hosts.cluster)?;
    hosts.cluster.wait_until_idle(AFTER_SHORT_LEASE)?;
    Ok(Outcome::Passed)
}

/// In a cluster of twenty, hosts crash, join, leave and return while programs use their memory. No
/// program notices, and the donors get all memory back.
pub(crate) fn twenty_come_and_go() -> TestResult {
    let at_first: Vec<usize> = (1..=MANY / 2).collect();
    let hosts = match Hosts::start(&at_first, MANY)? {
        Ok(hosts) => hosts,
        Err(reason) => return Ok(Outcome::Skipped(reason)),
    };
    let programs = [hosts.verifier("first", &[])?, hosts.verifier("second", &[])?];
    let until_whole = || hosts.cluster.until_whole_after(AFTER_OUTAGE, &["first", "second"]);
    let mut random = Random(11);
    let mut crashed = None;
    for turn in 0..5 {
        let (newcomer, victim) =
            (hosts.some_host(false, &mut random), hosts.some_host(true, &mut random));
        hosts.kill_node(victim)?;
        hosts.until_missed(victim)?;
        hosts.start_donor(newcomer)?;
        hosts.until_replaced(victim)?;
        until_whole().with_context(|| format!("turn {turn}: host {victim} crashed"))?;
        let leaver = hosts.some_host(true, &mut random);
        hosts.leave(leaver).with_context(|| format!("turn {turn}: host {leaver} leaves"))?;
        // One that crashed comes back with the name that it had, and with nothing of what it held.
        let returning = crashed.replace(victim).unwrap_or(leaver);
        if !hosts.donors.borrow().contains_key(&returning) {
            hosts.start_donor(returning)?;
        }
    }
    while hosts.donors.borrow().len() < MANY {
        hosts.start_donor(hosts.some_host(false, &mut random))?;
    }
    hosts.cluster.wait_for_donors(MANY)?;
    until_whole().context("with all hosts")?;
    for program in programs {
        program.has_verified(&hosts.cluster)?;
    }
    hosts.cluster.wait_until_idle(PATIENCE)?;
    Ok(Outcome::Passed)
}
