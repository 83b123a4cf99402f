//! Stock QEMU with its guest's memory in the pool: emulated (these machines cannot boot a stock
//! guest with KVM), under loads that verify what they read.

use crate::harness::{
    Outcome, TestResult,
    cluster::{AFTER_LEASE, Cluster, PATIENCE, all},
    guest::{GUEST_PATIENCE, Guests, Machine, Qemu, Spec, report},
    process::{Running, kill_dead, missing, run},
    wait::until,
};
use anyhow::{Context as _, ensure};
use hecaton_e2e::Random;
use hecaton_testkit::unused_port;
use serde_json::{Value, json};
use std::{
    env, fs,
    io::Write as _,
    path::{Path, PathBuf},
    process::{ChildStdin, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

/// Guests that fill half of their memory and read it back; `stress-ng` ends with an error if a bit
/// is wrong.
const VERIFY: &str = "stress-ng --vm 2 --vm-bytes 220M --verify --vm-method all -t 20";

/// The same again and again, until the guest is told that it is enough.
const VERIFY_UNTIL_TOLD: &str = "(read -r word </dev/ttyS0; touch /tmp/told) &
    until [ -e /tmp/told ]; do
        stress-ng --vm 2 --vm-bytes 220M --verify --vm-method all -t 20 || exit 1; done";

fn number(value: &Value, path: &str) -> anyhow::Result<u64> {
    value.pointer(path).and_then(Value::as_u64).with_context(|| format!("no {path} in {value}"))
}

/// The memory file itself, and not only the pager's count, stays below the limit.
fn stays_local(cluster: &Cluster, name: &str, limit: u64) -> anyhow::Result<()> {
    let Ok(report) = report(cluster, name) else { return Ok(()) };
    let bytes = report["pager"]["stats"]["memory_file_bytes"].as_u64().unwrap_or_default();
    ensure!(bytes <= limit, "{name} has {bytes} bytes on this host, and {limit} are its limit");
    Ok(())
}

/// Both of them are in the pager at once.
const TWO_PROCESSORS: &[&str] = &["-no-reboot", "-smp", "2"];

pub(crate) fn a_guest_verifies_its_memory(cluster: &Cluster, guests: &Guests) -> TestResult {
    let spec = Spec { script: VERIFY, arguments: TWO_PROCESSORS, ..Spec::default() };
    let mut machine = Machine::start(cluster, guests, &spec)?;
    let mut looked = Instant::now();
    machine.wait_for_watching("guest: exit 0", || {
        if looked.elapsed() > Duration::from_secs(1) {
            looked = Instant::now();
            stays_local(cluster, "guest", 64 << 20)?;
        }
        Ok(())
    })?;
    machine.end()?;
    Ok(Outcome::Passed)
}

pub(crate) fn debians_own_qemu(cluster: &Cluster, guests: &Guests) -> TestResult {
    let script = "stress-ng --vm 1 --vm-bytes 250M --verify -t 10";
    let spec = Spec { script, qemu: Qemu::Installed, ..Spec::default() };
    Machine::start(cluster, guests, &spec)?.succeed()?;
    Ok(Outcome::Passed)
}

pub(crate) fn four_gib_with_128_mib(cluster: &Cluster, guests: &Guests) -> TestResult {
    let script = "stress-ng --vm 2 --vm-bytes 1200M --vm-keep --verify -t 20";
    let (memory, local, arguments) = ("4G", "128M", TWO_PROCESSORS);
    let spec = Spec { memory, local, script, arguments, ..Spec::default() };
    Machine::start(cluster, guests, &spec)?.succeed()?;
    Ok(Outcome::Passed)
}

pub(crate) fn pagers_and_donors_die_under_it(cluster: &Cluster, guests: &Guests) -> TestResult {
    let spec = Spec { script: VERIFY_UNTIL_TOLD, arguments: TWO_PROCESSORS, ..Spec::default() };
    let mut machine = Machine::start(cluster, guests, &spec)?;
    machine.wait_for("dispatching hogs")?;
    let mut random = Random(3);
    let (mut next, mut killed) = (Instant::now(), 0);
    let are_killed = until("six of them are killed", GUEST_PATIENCE, || {
        ensure!(!machine.has_said("guest: exit"), "the guest has ended");
        if Instant::now() >= next {
            next = Instant::now() + Duration::from_millis(800 + random.below(800) as u64);
            let victim = match random.below(3) {
                // The one that was killed last may not be there again.
                0 => cluster.donor(random.below(3)).ok(),
                _ => cluster.known_pager()?,
            };
            victim.into_iter().for_each(kill_dead);
            killed += usize::from(victim.is_some());
        }
        Ok(if killed >= 6 { Ok(()) } else { Err(format!("{killed} are killed")) })
    });
    machine.explained(are_killed)?;
    cluster.wait_for_donors(3)?;
    machine.say("")?;
    machine.succeed()?;
    Ok(Outcome::Passed)
}

/// The machine leaves the pool in the middle of its work, and the donors have all back while it
/// runs on.
pub(crate) fn it_is_detached_and_runs_on(cluster: &Cluster, guests: &Guests) -> TestResult {
    let spec = Spec { script: VERIFY_UNTIL_TOLD, ..Spec::default() };
    let mut machine = Machine::start(cluster, guests, &spec)?;
    machine.wait_for("dispatching hogs")?;
    cluster.eventually("the pool holds something of it", GUEST_PATIENCE, |_| {
        Ok(report(cluster, "guest")?["pager"]["stats"]["pool_bytes"].as_u64() > Some(16 << 20))
    })?;
    let detached = run(cluster.command("vm").args(["detach", "guest"]), AFTER_LEASE)?;
    detached.expect_success("hecaton vm detach")?;
    let shown = report(cluster, "guest")?;
    ensure!(shown["state"] == "detached" && shown["pager"]["stats"]["pool_bytes"] == 0, "{shown}");
    machine.say("")?;
    machine.succeed()?;
    Ok(Outcome::Passed)
}

/// A virsh that stays: the embedded driver, and with it what it knows of domains, lives as long.
struct Virsh {
    running: Running,
    input: Option<ChildStdin>,
}

impl Virsh {
    fn start(program: &Path, uri: &str) -> anyhow::Result<Self> {
        let mut command = Command::new(program);
        command.args(["--quiet", "--connect", uri]).stdin(Stdio::piped());
        let mut running = Running::spawn(command.stdout(Stdio::null()).stderr(Stdio::null()))?;
        let input = running.child_mut().stdin.take();
        Ok(Self { running, input })
    }

    fn say(&mut self, line: &str) -> anyhow::Result<()> {
        let input = self.input.as_mut().context("virsh has no input")?;
        Ok(writeln!(input, "{line}")?)
    }
}

impl Drop for Virsh {
    /// libvirt's machines would outlive a test that failed.
    fn drop(&mut self) {
        let _ = self.say("destroy db");
        self.input = None;
        let _ = self.running.wait(PATIENCE, || Ok(()));
    }
}

pub(crate) fn libvirt_starts_it(cluster: &Cluster, guests: &Guests) -> TestResult {
    if let Some(reason) = missing("virsh") {
        return Ok(Outcome::Skipped(reason));
    }
    by_libvirt(cluster, guests, None)
}

/// libvirt 11. With Debian's own QEMU: to find out what one can do, libvirt has it load all of its
/// modules, and an unpacked one finds those of the installed one, which are of another version.
pub(crate) fn libvirt_of_the_backports_starts_it(cluster: &Cluster, guests: &Guests) -> TestResult {
    by_libvirt(cluster, guests, Some(guests.backports_virsh()))
}

/// Through a real libvirt, in this process group and a directory of its own (`qemu:///embed`).
/// `dir` is where its virsh is, if that is not in the path.
fn by_libvirt(cluster: &Cluster, guests: &Guests, dir: Option<PathBuf>) -> TestResult {
    let program = dir.as_ref().map_or_else(|| "virsh".into(), |dir| dir.join("virsh"));
    let path = env::var_os("PATH").unwrap_or_default();
    let path = env::join_paths(dir.into_iter().chain(env::split_paths(&path)))?;
    let root = cluster.file("libvirt");
    fs::create_dir_all(root.join("etc"))?;
    let settings = "user = \"root\"\ngroup = \"root\"\nsecurity_driver = \"none\"\n\
                    cgroup_controllers = []\nremember_owner = 0\nnamespaces = []\n\
                    stdio_handler = \"file\"\n";
    fs::write(root.join("etc/qemu.conf"), settings)?;
    let uri = format!("qemu:///embed?root={}", root.display());
    let virsh = || {
        let mut command = Command::new(&program);
        command.args(["--quiet", "--connect", &uri]).stdin(Stdio::null());
        command
    };
    let console = cluster.file("console");
    let script = "stress-ng --vm 1 --vm-bytes 250M --verify -t 10";
    let file = cluster.file("domain.xml");
    fs::write(&file, guests.domain("db", 512, &console, script))?;
    let defined = run(virsh().arg("define").arg(&file), PATIENCE)?;
    if !defined.status.success() {
        let reason = defined.stderr.lines().last().unwrap_or_default();
        return Ok(Outcome::Skipped(format!("libvirt does not run here: {reason}")));
    }
    let xml = || Ok::<_, anyhow::Error>(run(virsh().args(["dumpxml", "db"]), PATIENCE)?.text());
    let before = xml()?;
    let libvirt = |arguments: &[&str]| {
        let mut command = cluster.command("vm");
        command.args(["libvirt", "db", "--connect", &uri]).args(arguments).env("PATH", &path);
        run(&mut command, PATIENCE)
    };
    let refused = libvirt(&["--local", "64M"])?;
    ensure!(refused.stderr.contains("--yes"), "nobody agreed: {}", refused.stderr);
    ensure!(xml()? == before, "it was changed without being asked");
    let changed = libvirt(&["--local", "64M", "--yes"])?;
    changed.expect_success("hecaton vm libvirt")?;
    ensure!(changed.text().contains("+    <source type=\"memfd\"/>"), "{}", changed.text());

    let mut shell = Virsh::start(&program, &uri)?;
    shell.say("start db")?;
    cluster.eventually("libvirt's machine runs on pool memory", GUEST_PATIENCE, |_| {
        let Ok(shown) = report(cluster, "db") else { return Ok(false) };
        let bytes = shown.pointer("/pager/stats/guest_ram_bytes").and_then(Value::as_u64);
        Ok(shown["state"] == "running" && bytes == Some(512 << 20))
    })?;
    cluster.eventually("the guest has verified its memory", GUEST_PATIENCE, |_| {
        let said = fs::read_to_string(&console).unwrap_or_default();
        ensure!(!said.contains("guest: exit 1") && !said.contains("Oops"), "{said}");
        Ok(said.contains("guest: exit 0"))
    })?;
    cluster.wait_until_idle(PATIENCE)?;
    drop(shell);
    libvirt(&["--remove", "--yes"])?.expect_success("hecaton vm libvirt --remove")?;
    ensure!(xml()? == before, "it is not what it was:\n{}", xml()?);
    run(virsh().args(["undefine", "db"]), PATIENCE)?.expect_success("virsh undefine")?;
    fs::remove_dir_all(&root)?;
    Ok(Outcome::Passed)
}

pub(crate) fn a_killed_machine_leaves_nothing(cluster: &Cluster, guests: &Guests) -> TestResult {
    let spec = Spec { script: VERIFY, ..Spec::default() };
    let mut machine = Machine::start(cluster, guests, &spec)?;
    machine.wait_for("dispatching hogs")?;
    let monitor = report(cluster, "guest")?["monitor"].as_str().context("no monitor")?.to_owned();
    machine.kill(cluster)?;
    machine.end_of_any_kind()?;
    cluster.wait_until_idle(PATIENCE)?;
    cluster.eventually("it is not listed, and its monitor's socket is gone", PATIENCE, |_| {
        let listed = run(cluster.command("vm").args(["list", "--json"]), PATIENCE)?.text();
        Ok(listed.trim() == "[]" && !Path::new(&monitor).exists())
    })?;
    Ok(Outcome::Passed)
}

pub(crate) fn it_is_shown_and_resized(cluster: &Cluster, guests: &Guests) -> TestResult {
    let spec = Spec { script: VERIFY_UNTIL_TOLD, ..Spec::default() };
    let mut machine = Machine::start(cluster, guests, &spec)?;
    machine.wait_for("dispatching hogs")?;
    for size in ["160M", "32M", "96M"] {
        let resized = run(cluster.command("vm").args(["resize-local", "guest", size]), PATIENCE)?;
        resized.expect_success("hecaton vm resize-local")?;
        let report = report(cluster, "guest")?;
        let bytes: u64 = size.trim_end_matches('M').parse::<u64>()? << 20;
        ensure!(number(&report, "/pager/local_bytes")? == bytes, "{report}");
        until("it has given up the rest", PATIENCE, || Ok(stays_local(cluster, "guest", bytes)))?;
        // It grows on and must not have more.
        thread::sleep(Duration::from_secs(2));
        stays_local(cluster, "guest", bytes)?;
    }
    let shown = report(cluster, "guest")?;
    ensure!(shown["state"] == "running" && shown["run_state"] == "running", "{shown}");
    ensure!(number(&shown, "/memory_bytes")? == 512 << 20, "{shown}");
    let small = run(cluster.command("vm").args(["resize-local", "guest", "1M"]), PATIENCE)?;
    ensure!(small.status.code() == Some(1) && small.stderr.contains("too few"), "{}", small.stderr);
    let unknown = run(cluster.command("vm").args(["resize-local", "nobody", "64M"]), PATIENCE)?;
    ensure!(unknown.stderr.contains("no consumer `nobody`"), "{}", unknown.stderr);
    machine.say("")?;
    machine.succeed()?;
    Ok(Outcome::Passed)
}

pub(crate) fn memory_is_plugged(cluster: &Cluster, guests: &Guests) -> TestResult {
    // The guest waits until it has more memory than it was started with, and then uses it.
    let script = "while [ $(awk '/^MemTotal/ {print int($2/1024)}' /proc/meminfo) -lt 900 ]; do
            for block in /sys/devices/system/memory/memory*/state; do
                grep -q offline $block && echo online > $block
            done
            sleep 1
        done
        echo guest: plugged
        stress-ng --vm 2 --vm-bytes 700M --verify -t 15 || exit 1
        read -r word </dev/ttyS0";
    let arguments = &["-no-reboot", "-m", "size=512M,slots=2,maxmem=2G"];
    let spec = Spec { script, arguments, ..Spec::default() };
    let mut machine = Machine::start(cluster, guests, &spec)?;
    machine.wait_for("guest: ready")?;
    let mut monitor = machine.monitor()?;
    let backend = json!({
        "qom-type": "memory-backend-memfd", "id": "more", "size": 512u64 << 20, "share": true
    });
    monitor.execute("object-add", backend, PATIENCE)?;
    let dimm = json!({ "driver": "pc-dimm", "id": "dimm0", "memdev": "more" });
    monitor.execute("device_add", dimm, PATIENCE)?;
    machine.wait_for("guest: plugged")?;
    cluster.eventually("the node sees the plugged memory", PATIENCE, |_| {
        Ok(report(cluster, "guest")?["memory_bytes"].as_u64() == Some(1 << 30))
    })?;
    machine.say("")?;
    machine.succeed()?;
    Ok(Outcome::Passed)
}

/// virtio-mem gives the guest memory and takes it back; what it takes back leaves the pool.
pub(crate) fn memory_grows_and_shrinks(cluster: &Cluster, guests: &Guests) -> TestResult {
    let script = "has() { awk '/^MemTotal/ {print int($2/1024)}' /proc/meminfo; }
        echo online_movable > /sys/devices/system/memory/auto_online_blocks
        echo guest: waits
        while [ $(has) -lt 900 ]; do sleep 1; done
        stress-ng --vm 2 --vm-bytes 600M --verify -t 8 || exit 1
        echo guest: grown
        while [ $(has) -gt 600 ]; do sleep 1; done
        echo guest: shrunk
        stress-ng --vm 1 --vm-bytes 250M --verify -t 15 || exit 1
        read -r word </dev/ttyS0";
    let spec = Spec {
        script,
        arguments: &[
            "-no-reboot",
            "-m",
            "size=512M,maxmem=2G",
            "-object",
            "memory-backend-memfd,id=more,size=512M,share=on",
            "-device",
            "virtio-mem-pci,id=dimm,memdev=more,requested-size=0",
        ],
        ..Spec::default()
    };
    let mut machine = Machine::start(cluster, guests, &spec)?;
    machine.wait_for("guest: waits")?;
    let mut monitor = machine.monitor()?;
    let mut request = |bytes: u64| {
        let wish = json!({
            "path": "/machine/peripheral/dimm", "property": "requested-size", "value": bytes
        });
        monitor.execute("qom-set", wish, PATIENCE).map(drop)
    };
    request(512 << 20)?;
    machine.wait_for("guest: grown")?;
    stays_local(cluster, "guest", 64 << 20)?;
    let before = number(&report(cluster, "guest")?, "/pager/stats/pages_discarded")?;
    request(0)?;
    machine.wait_for("guest: shrunk")?;
    cluster.eventually("what was unplugged is given up", PATIENCE, |_| {
        let discarded = number(&report(cluster, "guest")?, "/pager/stats/pages_discarded")?;
        // The 600 MiB take more than this beyond the memory that the guest was started with.
        Ok(discarded >= before + (100 << 20) / 4096)
    })?;
    machine.say("")?;
    machine.succeed()?;
    Ok(Outcome::Passed)
}

/// A private backend would not be paged: the machine is stopped, and the reason is to be read.
pub(crate) fn what_is_plugged_and_cannot_be_paged_stops_it(
    cluster: &Cluster,
    guests: &Guests,
) -> TestResult {
    let arguments = &["-no-reboot", "-m", "size=512M,slots=2,maxmem=2G"];
    let spec = Spec { script: "sleep 300", arguments, ..Spec::default() };
    let mut machine = Machine::start(cluster, guests, &spec)?;
    machine.wait_for("guest: ready")?;
    let mut monitor = machine.monitor()?;
    let backend = json!({ "qom-type": "memory-backend-ram", "id": "private", "size": 128 << 20 });
    monitor.execute("object-add", backend, PATIENCE)?;
    cluster.eventually("the machine is stopped", PATIENCE, |_| {
        let report = report(cluster, "guest")?;
        let reason = report["reason"].as_str().unwrap_or_default();
        Ok(report["state"] == "stopped"
            && reason.contains("`private`")
            && reason.contains("share=on"))
    })?;
    let state = monitor.status(PATIENCE)?;
    ensure!(!state.running, "{state:?}");
    // Without it, the machine goes on, and is not stopped for the same thing again.
    monitor.execute("object-del", json!({ "id": "private" }), PATIENCE)?;
    monitor.resume(PATIENCE)?;
    cluster.eventually("the machine runs", PATIENCE, |_| {
        Ok(report(cluster, "guest")?["state"] == "running")
    })?;
    monitor.execute("quit", json!({}), PATIENCE)?;
    machine.end()?;
    Ok(Outcome::Passed)
}

pub(crate) fn eight_small_ones_at_once(cluster: &Cluster, guests: &Guests) -> TestResult {
    let script = "stress-ng --vm 1 --vm-bytes 100M --verify -t 4";
    let names: Vec<_> = (1..=8).map(|number| format!("small-{number}")).collect();
    let mut machines = Vec::new();
    for name in &names {
        let spec = Spec { name, memory: "256M", local: "32M", script, ..Spec::default() };
        machines.push(Machine::start(cluster, guests, &spec)?);
    }
    for machine in &mut machines {
        machine.succeed()?;
    }
    Ok(Outcome::Passed)
}

pub(crate) fn suspended_and_resumed(cluster: &Cluster, guests: &Guests) -> TestResult {
    let script =
        format!("echo guest: sleeping; echo mem > /sys/power/state; echo guest: awake; {VERIFY}");
    // A kernel that QEMU has started without firmware does not find its way back from a suspend.
    // The last `-kernel` counts.
    let kernel = guests.packed_kernel().display().to_string();
    let arguments = &["-no-reboot", "-kernel", &kernel];
    let spec = Spec { script: &script, arguments, ..Spec::default() };
    let mut machine = Machine::start(cluster, guests, &spec)?;
    machine.wait_for("guest: sleeping")?;
    let mut monitor = machine.monitor()?;
    until("the guest suspends itself", GUEST_PATIENCE, || {
        let status = monitor.status(PATIENCE)?.status;
        Ok(if status == "suspended" { Ok(()) } else { Err(format!("it is {status}")) })
    })?;
    monitor.execute("system_wakeup", json!({}), PATIENCE)?;
    machine.wait_for("guest: awake")?;
    machine.wait_for("dispatching hogs")?;
    // And from outside, in the middle of its work.
    for _ in 0..3 {
        monitor.stop(PATIENCE)?;
        cluster.eventually("the pause is seen", PATIENCE, |_| {
            Ok(report(cluster, "guest")?["state"] == "paused")
        })?;
        monitor.resume(PATIENCE)?;
        thread::sleep(Duration::from_millis(500));
    }
    machine.wait_for("guest: exit 0")?;
    // QEMU's q35 does not switch itself off any more after a suspend, with plain memory neither.
    monitor.execute("quit", json!({}), PATIENCE)?;
    machine.end()?;
    Ok(Outcome::Passed)
}

pub(crate) fn rebooted_again_and_again(cluster: &Cluster, guests: &Guests) -> TestResult {
    let script =
        "stress-ng --vm 1 --vm-bytes 250M --verify -t 2 || exit 1; echo guest: again; reboot -f";
    let spec = Spec { script, arguments: &[], ..Spec::default() };
    let mut machine = Machine::start(cluster, guests, &spec)?;
    for _ in 0..3 {
        machine.wait_for("guest: again")?;
    }
    machine.monitor()?.execute("quit", json!({}), PATIENCE)?;
    machine.end()?;
    Ok(Outcome::Passed)
}

/// QEMU reads the guest's whole memory through the pager into a dump, and the guest goes on.
pub(crate) fn saved_and_dumped(cluster: &Cluster, guests: &Guests) -> TestResult {
    let spec = Spec { script: VERIFY, ..Spec::default() };
    let mut machine = Machine::start(cluster, guests, &spec)?;
    machine.wait_for("dispatching hogs")?;
    let mut monitor = machine.monitor()?;
    let dump = cluster.file("dump");
    let wish = json!({ "paging": false, "protocol": format!("file:{}", dump.display()) });
    monitor.execute("dump-guest-memory", wish, GUEST_PATIENCE)?;
    ensure!(fs::metadata(&dump)?.len() > 512 << 20, "the dump is too short");
    fs::remove_file(&dump)?;
    machine.succeed()?;
    Ok(Outcome::Passed)
}

/// A node of its own is killed with its donor's memory, and comes back with none. The machine is
/// stopped, or waits for ever; it never goes on with zeros.
pub(crate) fn lost_memory_stops_it(cluster: &Cluster, guests: &Guests) -> TestResult {
    let port = unused_port();
    let lender = || {
        let mut node = cluster.command("node");
        node.args(["--name", "fragile", "--lend", "2G", "--listen", &format!("127.0.0.1:{port}")]);
        node.args(["--adopt-within", "0"]);
        Running::spawn(node.arg("--dir").arg(cluster.file("fragile")).stdout(Stdio::null()))
    };
    let is_fragile =
        |donor: &Value| donor["address"].as_str() == Some(&format!("127.0.0.1:{port}"));
    let lends = |status: &Value| {
        all(status, "donors").any(|donor| {
            is_fragile(donor) && donor["stats"]["lent_pages"].as_u64().unwrap_or(0) > 4096
        })
    };
    let mut node = lender()?;
    cluster.eventually("the other node serves", PATIENCE, |status| {
        Ok(all(status, "donors").any(|donor| is_fragile(donor) && donor["state"] == "serving"))
    })?;
    let script = "stress-ng --vm 2 --vm-bytes 300M --vm-keep --verify -t 600";
    // Or the donors of its own host would come first.
    let spec = Spec { script, options: &["--donors", "fragile"], ..Spec::default() };
    let mut machine = Machine::start(cluster, guests, &spec)?;
    machine.wait_for("dispatching hogs")?;
    cluster.eventually("the other node lends", GUEST_PATIENCE, |status| Ok(lends(status)))?;
    kill_dead(node.id());
    node.wait(PATIENCE, || Ok(()))?;
    // The manager gives its name to another only when it has been silent for a while.
    cluster.eventually("the manager misses the other node", PATIENCE, |status| {
        let mut nodes = status["nodes"].as_array().into_iter().flatten();
        Ok(nodes.any(|node| node["name"] == "fragile" && node["state"] == "silent"))
    })?;
    let node = lender()?;
    cluster.eventually("the machine is stopped", GUEST_PATIENCE, |_| {
        let report = report(cluster, "guest")?;
        let state = report["state"].as_str().unwrap_or_default();
        let reason = report["reason"].as_str().unwrap_or_default();
        Ok((state == "stopped" || state == "stuck") && reason.contains("lost"))
    })?;
    cluster.eventually("what is lost is counted", PATIENCE, |status| {
        let lost = |one: &Value| one["stats"]["pool"]["lost_bytes"].as_u64();
        Ok(all(status, "consumers").any(|one| one["name"] == "guest" && lost(one) > Some(0)))
    })?;
    // Were it fed zeros, it would say so at once.
    thread::sleep(Duration::from_secs(2));
    ensure!(!machine.has_said("fail"), "the guest found wrong data");
    machine.kill(cluster)?;
    machine.end_of_any_kind()?;
    cluster.wait_until_idle(AFTER_LEASE)?;
    drop(node);
    cluster.eventually("the other node has left", AFTER_LEASE, |status| {
        Ok(!all(status, "donors").any(is_fragile))
    })?;
    Ok(Outcome::Passed)
}

pub(crate) fn what_cannot_be_paged_is_said_before_it_starts(cluster: &Cluster) -> TestResult {
    for (arguments, words) in [
        (&["-m", "1G", "-device", "vfio-pci,host=01:00.0"][..], "-device vfio-pci,host=01:00.0"),
        (&["-m", "1G", "-drive", "file=x,cache=none"], "direct I/O"),
        (&["-m", "1G", "-mem-prealloc"], "-mem-prealloc"),
        (&["-M", "q35"], "how much memory"),
    ] {
        let mut command = cluster.command("vm");
        command.args(["run", "--local", "64M", "--", "sh"]).args(arguments);
        let ended = run(&mut command, PATIENCE)?;
        ensure!(ended.status.code() == Some(2), "{}: {}", ended.status, ended.stderr);
        ensure!(ended.stderr.contains(words), "{}", ended.stderr);
    }
    let mut printed = cluster.command("vm");
    printed.args(["run", "--local", "64M", "--memory", "1G", "--print", "--", "sh", "-M", "q35"]);
    let printed = run(&mut printed, PATIENCE)?.text();
    ensure!(printed.starts_with("sh -M q35,memory-backend=hecaton-ram"), "{printed}");
    cluster.wait_until_idle(AFTER_LEASE)?;
    Ok(Outcome::Passed)
}
