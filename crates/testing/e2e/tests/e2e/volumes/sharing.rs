//! A volume that several nodes want: one has it, and it goes from node to node.

use crate::{
    harness::{
        Outcome, TestResult,
        cluster::{Cluster, LONG, PATIENCE, all, hecaton, log_in, scratch, when_unused},
        process::{Ended, Running, Stopped, kill_dead, missing, missing_any, run},
        wait::until,
    },
    secure::{SecureManager, issue, secure_manager},
    volume::kill_server,
};
use anyhow::{Context as _, ensure};
use hecaton_e2e::Random;
use std::{
    fs,
    io::{BufRead as _, BufReader, Write as _},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
};

/// The command line of one of the hosts.
struct Host<'a> {
    cluster: &'a Cluster,
    name: &'static str,
}

impl Host<'_> {
    fn volume(&self, arguments: &[&str]) -> anyhow::Result<Ended> {
        let mut command = self.cluster.command("volume");
        command.env_remove("HECATON_MANAGER").args(arguments);
        command.arg("--dir").arg(self.cluster.file(self.name));
        run(&mut command, LONG)
    }

    fn does(&self, arguments: &[&str]) -> anyhow::Result<()> {
        self.volume(arguments)?.expect_success(&format!("{arguments:?} on {}", self.name))
    }

    /// In one line with these words.
    fn refuses(&self, arguments: &[&str], said: &[&str]) -> anyhow::Result<()> {
        let ended = self.volume(arguments)?;
        let what = format!("{arguments:?} on {} said {:?}", self.name, ended.stderr);
        ensure!(ended.status.code() == Some(1), "{what} and ended with {}", ended.status);
        ensure!(said.iter().all(|word| ended.stderr.contains(word)), "{what}, without {said:?}");
        ensure!(ended.stderr.lines().count() == 1, "{what}: not one line");
        Ok(())
    }

    fn socket(&self) -> PathBuf {
        self.cluster.file(&format!("{}.nbd", self.name))
    }

    fn export(&self) -> anyhow::Result<()> {
        self.does(&["export", "disk", "--nbd", &format!("unix:{}", self.socket().display())])
    }

    /// To be read, where it may be written elsewhere.
    fn export_to_read(&self) -> anyhow::Result<()> {
        let at = format!("unix:{}", self.socket().display());
        self.does(&["export", "disk", "--read-only", "--nbd", &at])
    }

    fn unexport(&self) -> anyhow::Result<()> {
        let address = format!("unix:{}", self.socket().display());
        when_unused(PATIENCE, || self.volume(&["unexport", "disk", "--nbd", &address]))
    }

    fn delete(&self) -> anyhow::Result<()> {
        when_unused(PATIENCE, || self.volume(&["delete", "disk"]))
    }

    fn uri(&self) -> String {
        format!("nbd+unix:///disk?socket={}", self.socket().display())
    }

    fn write(&self, image: &Path) -> anyhow::Result<()> {
        run(Command::new("nbdcopy").arg("--flush").arg(image).arg(self.uri()), LONG)?
            .expect_success("nbdcopy to the volume")
    }

    /// Nobody who writes is let in, for that reason.
    fn lets_nobody_write(&self, said: &str) -> anyhow::Result<()> {
        let is_let_in = self.lets_one_write_or_says(said)?;
        ensure!(!is_let_in, "qemu-io writes on {}, and is not told {said:?}", self.name);
        Ok(())
    }

    /// Whether a client that writes is let in. One that is not must be told that reason.
    fn lets_one_write_or_says(&self, said: &str) -> anyhow::Result<bool> {
        let mut writer = Command::new("qemu-io");
        let ended = run(writer.args(["-f", "raw", "-c", "write 0 4k"]).arg(self.uri()), LONG)?;
        let is_let_in = ended.status.success();
        let what = format!("qemu-io on {} said {:?}", self.name, ended.stderr);
        ensure!(is_let_in || ended.stderr.contains(said), "{what}, and not {said:?}");
        Ok(is_let_in)
    }

    /// Repeats what may be refused for a while.
    fn before_long(&self, what: impl Fn() -> anyhow::Result<()>) -> anyhow::Result<()> {
        until(&format!("{} does what it may refuse for a while", self.name), PATIENCE, || {
            Ok(what().map_err(|error| format!("{error:#}")))
        })
    }

    /// The process of the volume here.
    fn process(&self) -> anyhow::Result<u32> {
        let shown = self.volume(&["status", "disk", "--json"])?;
        let status: serde_json::Value = serde_json::from_str(&shown.text())?;
        Ok(u32::try_from(status["pid"].as_u64().context("it has no process")?)?)
    }

    /// `volume status` on this node must print `said`.
    fn shows(&self, said: &str) -> anyhow::Result<()> {
        let shown = self.volume(&["status", "disk"])?.text();
        ensure!(shown.contains(said), "{} shows {shown:?}, without {said:?}", self.name);
        Ok(())
    }

    fn holds(&self, image: &Path) -> anyhow::Result<()> {
        let copy = self.cluster.file(&format!("copy-{}", self.name));
        run(Command::new("nbdcopy").arg(self.uri()).arg(&copy), LONG)?
            .expect_success("nbdcopy from the volume")?;
        ensure!(fs::read(&copy)? == fs::read(image)?, "another image at {}", self.name);
        Ok(fs::remove_file(&copy)?)
    }

    /// Waits until the other nodes have no volume any more, and returns the process of this one's.
    fn has_it_alone(&self) -> anyhow::Result<u32> {
        let pid = until("one node has the volume, with a process", PATIENCE, || {
            let status = self.cluster.status()?;
            let mut nodes = status["nodes"].as_array().into_iter().flatten();
            let is_alone = nodes.all(|node| {
                let volumes = node["volumes"].as_array().map_or(0, Vec::len);
                volumes == usize::from(node["name"] == self.name)
            });
            let pid = all(&status, "volumes").next().and_then(|volume| volume["pid"].as_u64());
            Ok(pid.filter(|_| is_alone).ok_or(status))
        })?;
        Ok(u32::try_from(pid)?)
    }
}

fn image(cluster: &Cluster, name: &str, seed: u64) -> anyhow::Result<PathBuf> {
    let mut bytes = vec![0u8; 40 << 20];
    let mut random = Random(seed);
    bytes.chunks_mut(8).for_each(|word| word.copy_from_slice(&random.next().to_le_bytes()));
    let path = cluster.file(name);
    fs::write(&path, &bytes)?;
    Ok(path)
}

/// Nodes a, b and c with certificates, each of which lends; commands go to the first.
fn three_nodes(
    scratch: tempfile::TempDir,
) -> anyhow::Result<(Cluster, (SecureManager, [Running; 2]))> {
    let secure = secure_manager(&scratch, "warn")?;
    let SecureManager { pki, url, .. } = &secure;
    let node = |name: &str| {
        let mut command = Command::new(hecaton()?);
        command.args(["node", "--name", name, "--manager", url, "--lend", "120M", "--tls-dir"]);
        command.arg(issue(pki, name, "node", &[])?);
        command.args(["--adopt-within", "0", "--dir"]).arg(scratch.path().join(name));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log_in(&scratch)?);
        Running::spawn(&mut command)
    };
    let others = [node("b")?, node("c")?];
    let first = node("a")?;
    let admin = issue(pki, "root", "admin", &[])?;
    let prefix = vec!["env".into(), format!("HECATON_TLS={}", admin.display()).into()];
    let cluster = Cluster::of(url.clone(), prefix, first, scratch)?;
    cluster.wait_for_donors(3)?;
    Ok((cluster, (secure, others)))
}

/// Once nothing is stored any more, the others end when they are told to, and no key is in their
/// log.
fn all_end(cluster: &Cluster, others: [Running; 2]) -> TestResult {
    cluster.wait_until_idle(PATIENCE)?;
    let log = cluster.log_tail();
    ensure!(!log.contains("PRIVATE"), "a key is in the log");
    for mut other in others {
        other.signal(rustix::process::Signal::TERM);
        other.wait(PATIENCE, || Ok(()))?;
    }
    Ok(Outcome::Passed)
}

/// Three nodes with certificates, and an encrypted volume that one of them has at a time. Its
/// process is killed on either side of the hand-over.
pub(crate) fn a_volume_goes_from_node_to_node() -> TestResult {
    if let Some(reason) = missing("nbdcopy") {
        return Ok(Outcome::Skipped(reason));
    }
    let scratch = scratch()?;
    let (cluster, others) = three_nodes(scratch)?;
    let [a, b, c] = ["a", "b", "c"].map(|name| Host { cluster: &cluster, name });
    let (old, new) = (image(&cluster, "old", 1)?, image(&cluster, "new", 2)?);

    a.does(&["create", "disk", "--size", "40M", "--mirror", "2", "--encrypt"])?;
    a.export()?;
    a.write(&old)?;
    b.refuses(&["attach", "disk"], &["held by node `a`", "hecaton volume detach disk --to b"])?;
    a.refuses(&["detach", "disk", "--to", "x"], &["no node `x`"])?;
    a.refuses(&["detach", "disk", "--to", "b"], &["exported at unix:", "unexport disk"])?;
    a.unexport()?;
    a.does(&["detach", "disk", "--to", "c"])?;
    a.refuses(&["export", "disk", "--nbd", "127.0.0.1:0"], &["detached for node `c`"])?;
    // That one does not come.
    a.does(&["attach", "disk"])?;
    a.does(&["detach", "disk", "--to", "b"])?;
    c.refuses(&["attach", "disk"], &["held by node `a`, which has detached it for node `b`"])?;
    let served = a.has_it_alone()?;
    kill_dead(served);
    cluster.eventually("another process offers it", PATIENCE, |status| {
        let again = |volume: &serde_json::Value| {
            volume["pid"].as_u64().is_some_and(|pid| pid != u64::from(served))
                && volume["state"] == "serving"
        };
        Ok(all(status, "volumes").any(again))
    })?;
    b.does(&["attach", "disk"])?;
    let served = b.has_it_alone()?;
    b.export()?;
    b.holds(&old)?;
    a.refuses(&["attach", "disk"], &["held by node `b`"])?;
    b.write(&new)?;
    kill_server(served)?;
    b.holds(&new)?;

    // And back, to where a former process had it.
    b.unexport()?;
    b.does(&["detach", "disk", "--to", "a"])?;
    a.does(&["attach", "disk"])?;
    a.has_it_alone()?;
    a.export()?;
    a.holds(&new)?;
    a.delete()?;
    let (_manager, others) = others;
    all_end(&cluster, others)
}

/// A client of libnbd's shell, which is attached for as long as this is there. It reads a page for
/// each line that it is sent, and says what begins it, or that it failed.
const CLIENT: &str = r#"
import sys
print("attached", flush=True)
for line in sys.stdin:
    try:
        print(h.pread(4096, int(line))[:8].hex(), flush=True)
    except nbd.Error:
        print("error", flush=True)
"#;

/// Three nodes with certificates, and an encrypted volume that one of them has and the others read
/// by themselves.
pub(crate) fn nodes_read_one_volume_or_one_writes() -> TestResult {
    if let Some(reason) = missing_any(&["nbdcopy", "nbdsh", "qemu-io"]) {
        return Ok(Outcome::Skipped(reason));
    }
    let (cluster, others) = three_nodes(scratch()?)?;
    let [a, b, c] = ["a", "b", "c"].map(|name| Host { cluster: &cluster, name });
    let (old, new) = (image(&cluster, "old", 1)?, image(&cluster, "new", 2)?);
    // The first 8 MiB are a hole at first, for which a reader asks no donor.
    let mut bytes = fs::read(&old)?;
    bytes[..8 << 20].fill(0);
    fs::write(&old, &bytes)?;

    a.does(&[
        "create",
        "disk",
        "--size",
        "40M",
        "--mirror",
        "2",
        "--encrypt",
        "--donor-patience",
        "20",
    ])?;
    a.export()?;
    a.write(&old)?;
    b.refuses(&["attach", "disk", "--read-only"], &["held by node `a`", "volume share disk"])?;
    a.does(&["share", "disk"])?;
    let readers = [&b, &c];
    for reader in readers {
        reader.before_long(|| reader.does(&["attach", "disk", "--read-only"]))?;
        reader.export_to_read()?;
    }
    // At once, each through its own process.
    thread::scope(|scope| {
        let reading = readers.map(|host| scope.spawn(|| host.holds(&old)));
        reading.into_iter().try_for_each(|one| one.join().expect("it does not panic"))
    })?;
    a.lets_nobody_write("is attached as a reader")?;
    b.shows("node a has it, and shares it at ")?;
    a.before_long(|| a.shows("shared with nodes at ").and_then(|()| a.shows(": b, c\n")))?;
    a.refuses(&["delete", "disk"], &["in use by"])?;
    let attached = "node `b`, node `c` are attached to it";
    a.before_long(|| a.refuses(&["unshare", "disk"], &[attached]))?;
    a.refuses(&["detach", "disk", "--to", "b"], &["exported at", "unexport disk"])?;
    b.refuses(&["delete", "disk"], &["node `a`'s", "hecaton volume detach disk"])?;
    b.refuses(&["resize", "disk", "--size", "20M"], &["node `a`'s"])?;

    // One is killed, and is there again. The process that has it is killed under them.
    kill_dead(b.process()?);
    let had = a.process()?;
    thread::scope(|scope| {
        let reading = readers.map(|host| scope.spawn(|| host.before_long(|| host.holds(&old))));
        // Nobody has told the next process who reads.
        let refused = kill_server(had)
            .and_then(|()| a.lets_nobody_write("a volume has no writer beside readers"));
        refused.and_then(|()| {
            reading.into_iter().try_for_each(|one| one.join().expect("it does not panic"))
        })
    })?;
    // The donors that some of it is with are others then.
    let mut drain = cluster.command("node");
    let drained = run(drain.args(["drain", "c", "--deadline", "60"]), LONG)?;
    drained.expect_success("draining a donor under readers")?;
    readers.iter().try_for_each(|reader| reader.holds(&old))?;

    // One leaves, and one is stopped as a client is attached to it.
    c.unexport()?;
    c.does(&["detach", "disk"])?;
    let mut shell = Command::new("nbdsh");
    shell.args(["-u", &b.uri(), "-c", CLIENT]).stdin(Stdio::piped()).stdout(Stdio::piped());
    // The distribution's module is for its own Python, which need not be the first one.
    let mut shell = Running::spawn(shell.env("PATH", "/usr/bin:/bin:/usr/local/bin"))?;
    let mut asked = shell.child_mut().stdin.take().context("it has an input")?;
    let said = shell.output()?;
    let mut said = BufReader::new(said).lines();
    let mut says = |page: &str| -> anyhow::Result<String> {
        if !page.is_empty() {
            writeln!(asked, "{page}")?;
        }
        Ok(said.next().context("the client is gone")??)
    };
    ensure!(says("")? == "attached" && says("0")? == "0000000000000000", "the hole is no hole");
    let stopped = Stopped::stop(b.process()?);
    // On a slow machine its lease may have ended by now.
    a.lets_one_write_or_says("node `b` is attached as a reader")?;
    // Its lease ends.
    a.before_long(|| a.write(&new))?;
    drop(stopped);
    let hole = says("0")?;
    ensure!(hole == "error", "a reader that was stopped has said {hole} of what is written");
    drop(asked);
    shell.wait(PATIENCE, || Ok(()))?;
    // A reader that connects again finds the new contents.
    b.before_long(|| b.holds(&new))?;
    a.does(&["unshare", "disk", "--force"])?;
    a.write(&old)?;
    b.unexport()?;
    b.does(&["detach", "disk"])?;
    a.holds(&old)?;
    a.delete()?;
    let (_manager, others) = others;
    all_end(&cluster, others)
}
