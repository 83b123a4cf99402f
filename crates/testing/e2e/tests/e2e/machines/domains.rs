//! Domains of a real libvirt take part in what a node's agent divides. The libvirt is the test's
//! own, in a mount namespace, so that the machine's own is not touched; it hangs, is killed, and is
//! started again.

use crate::{
    agent::{Host, M, sleeping_qemu},
    harness::{
        Outcome, TestResult,
        cluster::{Cluster, PATIENCE, eventually},
        guest::{GUEST_PATIENCE, Guests},
        process::{Ended, Running, Stopped, kill_dead, missing_any, run},
        wait::until,
    },
};
use anyhow::{Context as _, ensure};
use serde_json::Value;
use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

/// UUIDs of the harvest domain and of the regular one. They contain the process id of this test,
/// which kills the domains' processes by their UUIDs.
fn harvest() -> String {
    format!("5c1b8f0e-2f0c-4c52-9f01-{:012x}", std::process::id())
}

fn plain() -> String {
    format!("5c1b8f0e-2f0c-4c52-9f02-{:012x}", std::process::id())
}

/// The guest makes plugged memory movable, and says when it has more than 800 MiB.
const SCRIPT: &str = "echo online_movable >/sys/devices/system/memory/auto_online_blocks
    while [ $(awk '/^MemTotal/ {print int($2 / 1024)}' /proc/meminfo) -le 800 ]; do sleep 1; done
    echo guest: has grown; sleep 3600";

const QEMU_CONF: &str = "user = \"root\"\ngroup = \"root\"\nsecurity_driver = \"none\"\n\
    cgroup_controllers = []\nremember_owner = 0\nnamespaces = []\nstdio_handler = \"file\"\n";

/// A libvirt daemon, and its machines.
struct Libvirtd {
    dir: PathBuf,
    uri: String,
    running: Option<Running>,
}

impl Libvirtd {
    /// The reason to skip if there cannot be one.
    fn start(cluster: &Cluster) -> anyhow::Result<Result<Self, String>> {
        if let Some(reason) = missing_any(&["virsh"]) {
            return Ok(Err(reason));
        }
        if !Path::new("/usr/sbin/libvirtd").is_file() {
            return Ok(Err("`libvirtd` is not installed".to_owned()));
        }
        let dir = cluster.file("libvirtd");
        fs::create_dir_all(&dir)?;
        fs::write(dir.join("qemu.conf"), QEMU_CONF)?;
        let settings = format!(
            "unix_sock_dir = \"{}\"\nauth_unix_rw = \"none\"\nauth_unix_ro = \"none\"\n",
            dir.display()
        );
        fs::write(dir.join("libvirtd.conf"), settings)?;
        // libvirt reads which hooks there are as it starts.
        let hook = "#!/bin/sh\n[ -e \"$HOOK\" ] || exit 0\nexec \"$HOOK\" \"$@\"\n";
        let hook = hook.replace("$HOOK", &dir.join("hook").display().to_string());
        fs::write(dir.join("hook-or-none"), hook)?;
        let script = "set -e
            for place in /run /etc/libvirt /var/lib/libvirt /var/cache/libvirt /var/log/libvirt; do
                mount -t tmpfs tmpfs $place
            done
            cp \"$1/qemu.conf\" /etc/libvirt/
            install -D -m 755 \"$1/hook-or-none\" /etc/libvirt/hooks/qemu
            exec /usr/sbin/libvirtd --config \"$1/libvirtd.conf\" --pid-file \"$1/pid\"";
        let mut command = Command::new("unshare");
        command.args(["--mount", "--propagation", "private", "sh", "-c", script, "sh"]).arg(&dir);
        let uri = format!("qemu+unix:///system?socket={}/libvirt-sock", dir.display());
        let mut libvirtd = Self { dir, uri, running: None };
        libvirtd.run(cluster, command)?;
        Ok(libvirtd.answers().map(|()| libvirtd).map_err(|error| {
            format!("no libvirtd can be started in a mount namespace here: {error:#}")
        }))
    }

    fn run(&mut self, cluster: &Cluster, mut command: Command) -> anyhow::Result<()> {
        command.stdin(Stdio::null()).stdout(cluster.log()?).stderr(cluster.log()?);
        self.running = Some(Running::spawn(&mut command)?);
        Ok(())
    }

    fn answers(&mut self) -> anyhow::Result<()> {
        until("libvirtd answers", PATIENCE, || {
            let listed = self.virsh(&["list"])?;
            if listed.status.success() {
                return Ok(Ok(()));
            }
            let running = self.running.as_mut().context("it was not started")?;
            let ended = running.child_mut().try_wait()?;
            ensure!(ended.is_none(), "it ended at once");
            Ok(Err(listed.stderr))
        })
    }

    fn virsh(&self, words: &[&str]) -> anyhow::Result<Ended> {
        let mut command = Command::new("virsh");
        run(command.args(["--quiet", "--connect", &self.uri]).args(words), GUEST_PATIENCE)
    }

    fn ok(&self, words: &[&str]) -> anyhow::Result<String> {
        let ended = self.virsh(words)?;
        ended.expect_success(&format!("virsh {}", words[0]))?;
        Ok(ended.text())
    }

    /// Domains ask from now on, as the printed script does, and wait for so many seconds.
    fn hook(&self, cluster: &Cluster, within: &str) -> anyhow::Result<()> {
        let mut command = cluster.command("vm");
        command.args(["libvirt-hook", "--within", within, "--dir"]).arg(cluster.file("agent-node"));
        let printed = run(&mut command, PATIENCE)?;
        printed.expect_success("hecaton vm libvirt-hook")?;
        let new = self.dir.join("hook.new");
        fs::write(&new, &printed.stdout)?;
        fs::set_permissions(&new, fs::Permissions::from_mode(0o755))?;
        Ok(fs::rename(new, self.dir.join("hook"))?)
    }

    /// SIGKILL; the machines run on. Which process has its mounts is told, for the next one.
    fn kill(&mut self) -> anyhow::Result<u32> {
        let mounts = machine(&harvest()).context("no machine runs")?;
        let mut running = self.running.take().context("it does not run")?;
        kill_dead(running.id());
        running.wait(PATIENCE, || Ok(()))?;
        Ok(mounts)
    }

    fn start_again(&mut self, cluster: &Cluster, mounts: u32) -> anyhow::Result<()> {
        let mut command = Command::new("nsenter");
        command.args(["--mount", "--target", &mounts.to_string(), "/usr/sbin/libvirtd"]);
        command.arg("--config").arg(self.dir.join("libvirtd.conf"));
        command.arg("--pid-file").arg(self.dir.join("pid"));
        self.run(cluster, command)?;
        self.answers()
    }

    /// A domain with a guest of so many MiB.
    fn define(&self, guests: &Guests, name: &str, uuid: &str, mib: u64) -> anyhow::Result<()> {
        let console = self.dir.join(format!("{name}.console"));
        let port = self.dir.join(format!("{name}.port"));
        // Where this test can see it: libvirt's own place is in the mount namespace.
        let channel = format!(
            "<channel type='unix'><source mode='bind' path='{}'/>\
             <target type='virtio' name='org.hecaton.guest.0'/></channel></devices>",
            port.display()
        );
        let xml = guests.domain(name, mib, &console, SCRIPT);
        let xml = xml.replace("</name>", &format!("</name><uuid>{uuid}</uuid>"));
        let file = self.dir.join(format!("{name}.xml"));
        fs::write(&file, xml.replace("</devices>", &channel))?;
        self.ok(&["define", file.to_str().context("a path")?]).map(drop)
    }
}

impl Drop for Libvirtd {
    /// The machines are no children of anybody's here.
    fn drop(&mut self) {
        for uuid in [harvest(), plain()] {
            let _ = machine(&uuid).map(kill_dead);
        }
    }
}

/// The process of a domain's machine.
fn machine(uuid: &str) -> Option<u32> {
    let entries = fs::read_dir("/proc").ok()?.flatten();
    let mut pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    pids.find(|pid| {
        let line = fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.split('\0').collect::<Vec<_>>().windows(2).any(|pair| pair == ["-uuid", uuid])
    })
}

fn failure(status: &Value) -> &str {
    status["libvirt"]["failure"].as_str().unwrap_or_default()
}

fn state<'a>(status: &'a Value, name: &str) -> Option<&'a str> {
    let machines = status["machines"].as_array()?;
    machines.iter().find(|machine| machine["name"] == name)?["state"].as_str()
}

/// A domain that was made a harvest VM grows, gives way to a regular machine, and is shut down for
/// the next one, while its libvirt hangs, is killed and comes back in between. Domains are started
/// when there is room for them, or counted when they are seen.
pub(crate) fn a_domain_is_a_harvest_vm(cluster: &Cluster, guests: &Guests) -> TestResult {
    let mut libvirt = match Libvirtd::start(cluster)? {
        Ok(libvirt) => libvirt,
        Err(reason) => return Ok(Outcome::Skipped(reason)),
    };
    let uri = libvirt.uri.clone();
    let arguments = ["--libvirt", uri.as_str(), "--eviction-warning", "6"];
    let mut host = Host::start_with(cluster, &arguments)?;
    let hecaton = |words: &[&str]| {
        let mut command = cluster.command("vm");
        run(command.args(["libvirt", "db", "--connect", &uri]).args(words), PATIENCE)
    };
    libvirt.define(guests, "db", &harvest(), 512)?;
    libvirt.define(guests, "plain", &plain(), 256)?;
    let refused = hecaton(&["--harvest", "--min", "256M", "--max", "256M"])?;
    ensure!(refused.stderr.contains("never grows"), "{}", refused.stderr);
    let made = hecaton(&["--harvest", "--min", "256M", "--max", "1G", "--yes"])?;
    made.expect_success("hecaton vm libvirt --harvest")?;
    ensure!(made.text().contains("+    <memory model=\"virtio-mem\">"), "{}", made.text());
    libvirt.hook(cluster, "400")?;
    libvirt.ok(&["start", "db"])?;
    let admitted = |host: &Host<'_>| anyhow::Ok(host.status()?["counters"]["admitted"].clone());
    ensure!(admitted(&host)? == 1, "it was started without having been admitted");
    host.until("alone, it has its maximum", 768, 0)?;
    let console = libvirt.dir.join("db.console");
    let said = || Ok(fs::read_to_string(&console).unwrap_or_default().into());
    eventually(said, "the guest has it", GUEST_PATIENCE, |said| {
        Ok(said.as_str().is_some_and(|said| said.contains("has grown")))
    })?;

    // Without the hook nobody asks.
    fs::remove_file(libvirt.dir.join("hook"))?;
    libvirt.ok(&["start", "plain"])?;
    host.until("a domain that did not ask is seen", 704, 256)?;
    ensure!(admitted(&host)? == 1, "it has asked");
    let status = host.status()?;
    ensure!(state(&status, "libvirt:plain") == Some("running"), "{status}");
    libvirt.ok(&["destroy", "plain"])?;
    host.until("it has ended", 768, 0)?;

    let start = |host: &Host<'_>, name: &str, memory: &str| {
        let mut command = host.create(&["--name", name, "--regular", "--memory", memory]);
        Running::spawn(command.arg(sleeping_qemu(cluster)?).stdout(Stdio::null()))
    };
    let first = start(&host, "first", "512M")?;
    host.until("a regular VM has come", 448, 512)?;
    let said = libvirt.ok(&["dumpxml", "db"])?;
    ensure!(said.contains("<current unit='KiB'>458752<"), "libvirt says otherwise: {said}");

    // It hangs, and nobody else does.
    let daemon = libvirt.running.as_ref().context("it runs")?.id();
    let stopped = Stopped::stop(daemon);
    host.eventually("libvirt is known to hang", PATIENCE, |status| {
        Ok(failure(status).contains("no answer") && state(status, "libvirt:db") == Some("silent"))
    })?;
    let small = start(&host, "small", "64M")?;
    host.eventually("the buffer is there for others", PATIENCE, |status| {
        Ok(state(status, "small").is_some())
    })?;
    drop(small);
    drop(stopped);
    host.until("it answers again", 448, 512)?;

    // It is gone, and so is the agent; what its domain has is still the domain's.
    let mounts = libvirt.kill()?;
    host.eventually("libvirt is known to be gone", PATIENCE, |status| {
        Ok(!failure(status).is_empty() && state(status, "libvirt:db") == Some("silent"))
    })?;
    let shown = run(
        cluster.command("host").args(["status", "--dir"]).arg(cluster.file("agent-node")),
        PATIENCE,
    )?;
    ensure!(shown.text().contains("says nothing: "), "{}", shown.text());
    host.kill_node()?;
    host.start_node()?;
    host.eventually("the next agent counts it as large as it may be", PATIENCE, |status| {
        let is_all = status["nodes"][0]["harvested_bytes"] == 768 * M;
        Ok(is_all && state(status, "libvirt:db") == Some("silent"))
    })?;
    libvirt.start_again(cluster, mounts)?;
    host.until("there is a libvirt again", 448, 512)?;

    // libvirt lists nothing while its hook waits for what the other domain is to give.
    libvirt.hook(cluster, "400")?;
    libvirt.ok(&["start", "plain"])?;
    ensure!(admitted(&host)? == 1, "it was started without having been admitted");
    host.until("a domain has asked, and has come", 192, 768)?;
    libvirt.ok(&["destroy", "plain"])?;

    // Its minimum is needed, and its guest does not shut down by itself.
    drop(first);
    host.until("all have left", 768, 0)?;
    let status = host.status()?;
    ensure!(status["counters"]["warned"] == 0, "it was warned before: {status}");
    let second = start(&host, "second", "1100M")?;
    host.eventually("it is warned", PATIENCE, |status| Ok(status["counters"]["warned"] == 1))?;
    host.eventually("it has gone, and the other is there", GUEST_PATIENCE, |status| {
        let gave_way = &status["gave_way"][0]["name"];
        Ok(state(status, "second").is_some()
            && state(status, "libvirt:db").is_none()
            && *gave_way == "libvirt:db")
    })?;
    ensure!(machine(&harvest()).is_none(), "its QEMU is still there");
    // libvirt hears from QEMU's monitor, a moment later than the agent sees the process end.
    until("libvirt knows that it is shut off", PATIENCE, || {
        let domstate = libvirt.ok(&["domstate", "db"])?;
        Ok(if domstate.trim() == "shut off" { Ok(()) } else { Err(domstate) })
    })?;

    // There is no room: one domain asks for as long as it may, the other is refused at once.
    for (name, within, words) in
        [("db", "2", "was not admitted within 2 s"), ("plain", "400", "choose another host")]
    {
        libvirt.hook(cluster, within)?;
        let refused = libvirt.virsh(&["start", name])?;
        ensure!(!refused.status.success(), "{name} is started");
        ensure!(refused.stderr.contains(words), "{name}: {}", refused.stderr);
    }
    drop(second);
    hecaton(&["--remove", "--yes"])?.expect_success("hecaton vm libvirt --remove")?;
    let left = libvirt.ok(&["dumpxml", "db"])?;
    ensure!(!left.contains("hecaton:vm") && !left.contains("virtio-mem"), "{left}");
    Ok(Outcome::Passed)
}

/// Without libvirt its agent is one like any other, and says so.
pub(crate) fn no_libvirt_stalls_nobody(cluster: &Cluster) -> TestResult {
    let uri = format!("qemu+unix:///system?socket={}", cluster.file("no-socket").display());
    let arguments = ["--libvirt", uri.as_str()];
    let host = Host::start_with(cluster, &arguments)?;
    host.eventually("it is said", PATIENCE, |status| Ok(!failure(status).is_empty()))?;
    let mut command = host.create(&["--name", "one", "--regular", "--memory", "512M"]);
    let _one = Running::spawn(command.arg(sleeping_qemu(cluster)?).stdout(Stdio::null()))?;
    host.eventually("others are admitted", PATIENCE, |status| {
        Ok(state(status, "one").is_some() && status["nodes"][0]["regular_bytes"] == 512 * M)
    })?;
    // A hook that finds no agent holds nobody up.
    let domain = "<domain type='kvm'><name>a</name><uuid>5c1b8f0e-2f0c-4c52-9f0b-0f6b5f3a7a03</uuid>\
        <memory>65536</memory></domain>";
    let file = cluster.file("hooked.xml");
    fs::write(&file, domain)?;
    let admit = |dir: &str, operation: &str| {
        let mut command = cluster.command("vm");
        command.args(["admit", "--within", "400", "--dir"]).arg(cluster.file(dir));
        command.args(["--", "a", operation, "begin", "-"]).stdin(fs::File::open(&file)?);
        run(&mut command, PATIENCE)
    };
    let alone = admit("nobody", "prepare")?;
    alone.expect_success("hecaton vm admit without a node")?;
    ensure!(alone.stderr.contains("without being admitted"), "{}", alone.stderr);
    admit("agent-node", "release")?.expect_success("hecaton vm admit of an end")?;
    ensure!(host.status()?["machines"][1].is_null(), "it was admitted when it ended");
    admit("agent-node", "prepare")?.expect_success("hecaton vm admit")?;
    host.eventually("it is told of", PATIENCE, |status| {
        Ok(state(status, "libvirt:a") == Some("starting"))
    })?;
    // The one that was not started asks again, and is not counted twice.
    admit("agent-node", "prepare")?.expect_success("hecaton vm admit again")?;
    host.eventually("it is counted once", PATIENCE, |status| {
        Ok(status["nodes"][0]["regular_bytes"] == 576 * M)
    })?;
    // An agent that does not ask libvirt would not see it run.
    let other = admit("node", "prepare")?;
    ensure!(other.stderr.contains("no agent"), "{}", other.stderr);
    Ok(Outcome::Passed)
}
