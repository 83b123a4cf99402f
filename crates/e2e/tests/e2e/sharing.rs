//! A volume that several nodes want: one has it, and it goes from node to node.

use crate::{
    cluster::{Cluster, LONG, PATIENCE, all, hecaton, log_in, scratch},
    harness::{Outcome, TestResult},
    process::{Ended, Running, kill_dead, missing, run},
    secure::{SecureManager, issue, secure_manager},
};
use anyhow::{Context as _, ensure};
use hecaton_e2e::Random;
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
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

    fn unexport(&self) -> anyhow::Result<()> {
        self.does(&["unexport", "disk", "--nbd", &format!("unix:{}", self.socket().display())])
    }

    fn uri(&self) -> String {
        format!("nbd+unix:///disk?socket={}", self.socket().display())
    }

    fn write(&self, image: &Path) -> anyhow::Result<()> {
        run(Command::new("nbdcopy").arg("--flush").arg(image).arg(self.uri()), LONG)?
            .expect_success("nbdcopy to the volume")
    }

    fn holds(&self, image: &Path) -> anyhow::Result<()> {
        let copy = self.cluster.file("copy");
        run(Command::new("nbdcopy").arg(self.uri()).arg(&copy), LONG)?
            .expect_success("nbdcopy from the volume")?;
        ensure!(fs::read(&copy)? == fs::read(image)?, "another image at {}", self.name);
        Ok(fs::remove_file(&copy)?)
    }

    /// Waits until the other nodes have no volume any more, and returns the process of this one's.
    fn has_it_alone(&self) -> anyhow::Result<u32> {
        self.cluster.eventually("one node has the volume", PATIENCE, |status| {
            let mut nodes = status["nodes"].as_array().into_iter().flatten();
            Ok(nodes.all(|node| {
                let volumes = node["volumes"].as_array().map_or(0, Vec::len);
                volumes == usize::from(node["name"] == self.name)
            }))
        })?;
        let status = self.cluster.status()?;
        let pid = all(&status, "volumes").next().and_then(|volume| volume["pid"].as_u64());
        Ok(u32::try_from(pid.context("it has no process")?)?)
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

/// Three nodes with certificates, and an encrypted volume that one of them has at a time. Its process is killed on
/// either side of the hand-over.
pub(crate) fn a_volume_goes_from_node_to_node(_: &Cluster) -> TestResult {
    if let Some(reason) = missing("nbdcopy") {
        return Ok(Outcome::Skipped(reason));
    }
    let scratch = scratch()?;
    let SecureManager { pki, url, manager: _manager } = secure_manager(&scratch, "warn")?;
    let node = |name: &str| {
        let mut command = Command::new(hecaton()?);
        command.args(["node", "--name", name, "--manager", &url, "--lend", "120M", "--tls-dir"]);
        command.arg(issue(&pki, name, "node", &[])?);
        command.args(["--adopt-within", "0", "--dir"]).arg(scratch.path().join(name));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log_in(&scratch)?);
        Running::spawn(&mut command)
    };
    let others = [node("b")?, node("c")?];
    let first = node("a")?;
    let admin = issue(&pki, "root", "admin", &[])?;
    let prefix = vec!["env".into(), format!("HECATON_TLS={}", admin.display()).into()];
    let cluster = Cluster::of(url.clone(), prefix, first, scratch)?;
    cluster.wait_for_donors(3)?;
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
    kill_dead(served);
    b.holds(&new)?;

    // And back, to where a former process had it.
    b.unexport()?;
    b.does(&["detach", "disk", "--to", "a"])?;
    a.does(&["attach", "disk"])?;
    a.has_it_alone()?;
    a.export()?;
    a.holds(&new)?;
    a.does(&["delete", "disk"])?;
    cluster.wait_until_idle(PATIENCE)?;
    let log = cluster.log_tail();
    ensure!(!log.contains("PRIVATE"), "a key is in the log");
    for mut other in others {
        other.signal(rustix::process::Signal::TERM);
        other.wait(PATIENCE, || Ok(()))?;
    }
    Ok(Outcome::Passed)
}
