//! Machines that somebody else starts, through `hecaton vm attach`.

use crate::harness::{
    Outcome, TestResult,
    cluster::{Cluster, PATIENCE},
    guest::{Attachment, Guests, Machine, Spec, report},
    process::{Running, kill_dead, run},
};
use anyhow::{Context as _, ensure};
use hecaton_e2e::Random;
use std::{
    fs,
    io::{BufRead as _, BufReader, Write as _},
    process::{ChildStdin, ChildStdout, Command, Stdio},
};

pub(crate) fn of_qemu(cluster: &Cluster, guests: &Guests) -> TestResult {
    let script = "stress-ng --vm 2 --vm-bytes 200M --verify -t 10";
    let (mut machine, mut attachment) =
        Machine::start_attached(cluster, guests, &Spec { script, ..Spec::default() })?;
    machine.wait_for("dispatching hogs")?;
    cluster.eventually("the machine is followed", PATIENCE, |_| {
        let report = report(cluster, "guest")?;
        let stats = &report["pager"]["stats"];
        Ok(report["state"] == "running" && stats["guest_ram_bytes"].as_u64() == Some(512 << 20))
    })?;
    let taken = Attachment::start(cluster, "guest", "64M", |_| ());
    ensure!(taken.is_err(), "the name was given twice");
    machine.succeed()?;
    attachment.end()?;
    cluster.wait_until_idle(PATIENCE)?;
    Ok(Outcome::Passed)
}

/// The test client that hands its memory over as Firecracker does.
pub(crate) struct Firecracker {
    running: Running,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Firecracker {
    pub(crate) fn start(socket: &str, image: &std::path::Path) -> anyhow::Result<Self> {
        let mut command = Command::new(env!("CARGO_BIN_EXE_firecracker-client"));
        command.arg(socket).arg(image).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut running = Running::spawn(&mut command)?;
        let input = running.child_mut().stdin.take();
        let output = running.output()?;
        Ok(Self { running, input, output: BufReader::new(output) })
    }

    /// Waits until it has done what it was last told.
    pub(crate) fn is_done(&mut self) -> anyhow::Result<bool> {
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        Ok(line == "done\n")
    }

    pub(crate) fn round(&mut self) -> anyhow::Result<()> {
        self.begin()?;
        ensure!(self.is_done()?, "the client has found wrong data, or was ended");
        Ok(())
    }

    fn begin(&mut self) -> anyhow::Result<()> {
        Ok(writeln!(self.input.as_ref().context("it has no input")?, "round")?)
    }

    pub(crate) fn end(mut self) -> anyhow::Result<()> {
        self.input = None;
        let status = self.running.wait(PATIENCE, || Ok(()))?;
        ensure!(status.success(), "the client ended with {status}");
        Ok(())
    }
}

/// A restored snapshot, whose pager is killed while it reads.
pub(crate) fn of_firecracker(cluster: &Cluster) -> TestResult {
    let image = cluster.file("snapshot");
    let mut random = Random(11);
    let bytes: Vec<u8> = (0..64 << 20).map(|_| random.below(256) as u8).collect();
    fs::write(&image, bytes)?;
    let socket = cluster.file("firecracker.sock");
    let mut attachment = Attachment::start(cluster, "micro", "64M", |command| {
        command.arg("--firecracker").arg(&socket).arg("--image").arg(&image);
    })?;
    ensure!(attachment.needs["library"].is_null(), "{}", attachment.needs);
    ensure!(attachment.socket()? == socket.to_str().context("a path")?, "{}", attachment.needs);
    let mut client = Firecracker::start(attachment.socket()?, &image)?;
    ensure!(client.is_done()?, "the client hands nothing over");
    client.begin()?;
    kill_dead(cluster.pager_of_only_consumer()?);
    ensure!(client.is_done()?, "the client has found wrong data, or was ended");
    client.round()?;
    cluster.eventually("the machine is shown", PATIENCE, |_| {
        let shown = report(cluster, "micro")?;
        let advisory = &shown["pager"]["stats"]["limit_is_advisory"];
        Ok(shown["state"] == "running" && advisory == true)
    })?;
    let mut resized = cluster.command("vm");
    resized.args(["resize-local", "micro", "32M", "--dir"]).arg(cluster.file("node"));
    let resized = run(&mut resized, PATIENCE)?;
    ensure!(resized.status.code() == Some(1), "{}", resized.status);
    ensure!(resized.stderr.contains("private"), "{}", resized.stderr);

    // A second machine gets nothing of it, and does no harm.
    let mut second = Firecracker::start(attachment.socket()?, &image)?;
    ensure!(second.is_done()?, "the second client has not even connected");
    client.round()?;
    cluster.eventually("the second one is refused", PATIENCE, |_| {
        Ok(report(cluster, "micro")?["pager"]["stats"]["handovers_refused"].as_u64() == Some(1))
    })?;
    // It waits for its first page for ever.
    drop(second);
    client.end()?;
    attachment.end()?;
    fs::remove_file(&image)?;
    cluster.wait_until_idle(PATIENCE)?;
    Ok(Outcome::Passed)
}
