//! Tests volumes with libnbd's tools, QEMU and fio while processes are killed.

use crate::harness::{
    Outcome, TestResult,
    cluster::{Cluster, LONG, PATIENCE, is_since, start_writing, when_unused},
    fio::{end_fio, fio_verify, no_fio},
    process::{Running, kill_dead, missing, missing_any, run, signal},
    wait::until,
};
use anyhow::{Context as _, ensure};
use hecaton_e2e::Random;
use hecaton_memory::unix_time_ms;
use rustix::process::Signal;
use serde_json::{Value, json};
use std::{
    fs,
    net::TcpListener,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::Duration,
};

/// A volume with a socket. A test deletes it and must find it unused; a failed test deletes it too.
pub(crate) struct Disk<'a> {
    cluster: &'a Cluster,
    name: &'static str,
    socket: PathBuf,
    is_deleted: bool,
}

/// Kills a process that serves a volume, and waits until it is gone: a dying one may still take a
/// client, and takes it along.
pub(crate) fn kill_server(pid: u32) -> anyhow::Result<()> {
    kill_dead(pid);
    until("the killed process is gone", PATIENCE, || {
        let process = format!("/proc/{pid}");
        Ok(if Path::new(&process).exists() { Err(process) } else { Ok(()) })
    })
}

impl Drop for Disk<'_> {
    fn drop(&mut self) {
        if self.is_deleted {
            return;
        }
        // Its clients go with what held them.
        let _ = delete(self.cluster, self.name, Duration::from_secs(5));
    }
}

/// Deletes a volume that nobody uses.
pub(crate) fn delete(cluster: &Cluster, name: &str, limit: Duration) -> anyhow::Result<()> {
    when_unused(limit, || run(cluster.command("volume").args(["delete", name]), PATIENCE))
}

impl<'a> Disk<'a> {
    pub(crate) fn create(
        cluster: &'a Cluster,
        name: &'static str,
        size: &str,
        options: &[&str],
    ) -> anyhow::Result<Disk<'a>> {
        let socket = cluster.file(&format!("{name}.nbd"));
        let mut create = cluster.command("volume");
        create.args(["create", name, "--size", size]).args(options);
        run(&mut create, PATIENCE)?.expect_success("hecaton volume create")?;
        let disk = Disk { cluster, name, socket, is_deleted: false };
        disk.export(&["--nbd", &format!("unix:{}", disk.socket.display())])?;
        Ok(disk)
    }

    /// A copy of it as of this moment.
    pub(crate) fn snapshot(&self, name: &'static str) -> anyhow::Result<Disk<'a>> {
        let mut snapshot = self.cluster.command("volume");
        run(snapshot.args(["snapshot", self.name, name]), LONG)?
            .expect_success("hecaton volume snapshot")?;
        let socket = self.cluster.file(&format!("{name}.nbd"));
        let copy = Disk { cluster: self.cluster, name, socket, is_deleted: false };
        copy.export(&["--nbd", &format!("unix:{}", copy.socket.display())])?;
        Ok(copy)
    }

    /// Has it served at one more address, and returns what is printed of that.
    pub(crate) fn export(&self, options: &[&str]) -> anyhow::Result<String> {
        let mut export = self.cluster.command("volume");
        let ended = run(export.args(["export", self.name]).args(options), PATIENCE)?;
        ended.expect_success("hecaton volume export")?;
        Ok(ended.text().trim().to_owned())
    }

    /// Refuses to be exported like this, in one line with these words.
    pub(crate) fn refuses(&self, options: &[&str], said: &[&str]) -> anyhow::Result<()> {
        self.refuses_to("export", options, said)
    }

    /// The same of another command.
    fn refuses_to(&self, command: &str, options: &[&str], said: &[&str]) -> anyhow::Result<()> {
        let mut refused = self.cluster.command("volume");
        let ended = run(refused.args([command, self.name]).args(options), PATIENCE)?;
        let what = format!("{command} {options:?} said {:?}", ended.stderr);
        ensure!(ended.status.code() == Some(1), "{what} and ended with {}", ended.status);
        ensure!(said.iter().all(|word| ended.stderr.contains(word)), "{what}, without {said:?}");
        ensure!(ended.stderr.lines().count() == 1, "{what}: not one line");
        Ok(())
    }

    /// Takes an export back.
    pub(crate) fn unexport(&self, options: &[&str]) -> anyhow::Result<()> {
        let mut unexport = self.cluster.command("volume");
        let ended = run(unexport.args(["unexport", self.name]).args(options), PATIENCE)?;
        ended.expect_success("hecaton volume unexport")
    }

    pub(crate) fn uri(&self) -> String {
        format!("nbd+unix:///{}?socket={}", self.name, self.socket.display())
    }

    /// Returns the output of `hecaton volume status --json`.
    pub(crate) fn status(&self) -> anyhow::Result<Value> {
        let mut status = self.cluster.command("volume");
        let ended = run(status.args(["status", self.name, "--json"]), PATIENCE)?;
        ended.expect_success("hecaton volume status")?;
        Ok(serde_json::from_slice(&ended.stdout)?)
    }

    /// Returns statistics that the volume took after this call began.
    pub(crate) fn stats(&self) -> anyhow::Result<Value> {
        let since_ms = unix_time_ms();
        until("the volume tells its statistics", PATIENCE, || {
            let stats = self.status()?["stats"].clone();
            Ok(if is_since(&stats, since_ms) { Ok(stats) } else { Err(stats) })
        })
    }

    /// The process that serves it, as soon as one does.
    pub(crate) fn pid(&self) -> anyhow::Result<u32> {
        until("a process serves the volume", PATIENCE, || {
            let status = self.status()?;
            Ok(status["pid"].as_u64().and_then(|pid| pid.try_into().ok()).ok_or(status))
        })
    }

    /// Kills the process that serves it.
    pub(crate) fn kill(&self) -> anyhow::Result<()> {
        kill_server(self.pid()?)
    }

    /// Nobody is connected any more, and its socket is gone with it.
    pub(crate) fn delete(mut self) -> anyhow::Result<()> {
        delete(self.cluster, self.name, PATIENCE)?;
        self.is_deleted = true;
        ensure!(!self.socket.exists(), "the socket of a deleted volume is left");
        Ok(())
    }
}

/// A file of random bytes with holes between them, whose size is not of whole pages.
fn image(path: &Path) -> anyhow::Result<()> {
    let mut random = Random(5);
    let mut bytes = vec![0u8; (24 << 20) + 1536];
    for chunk in bytes.chunks_mut(256 << 10).step_by(3) {
        chunk.chunks_mut(8).for_each(|word| {
            let random = random.next().to_le_bytes();
            word.copy_from_slice(&random[..word.len()]);
        });
    }
    Ok(fs::write(path, bytes)?)
}

/// Copied in by one client and out by another, it is the same; so are bytes at odd places.
pub(crate) fn clients_of_others_agree(cluster: &Cluster) -> TestResult {
    if let Some(reason) = missing_any(&["nbdinfo", "nbdcopy", "qemu-img", "qemu-io"]) {
        return Ok(Outcome::Skipped(reason));
    }
    let disk = Disk::create(cluster, "disk", "25M", &[])?;
    let uri = disk.uri();
    let ended = run(Command::new("nbdinfo").args(["--json", &uri]), PATIENCE)?;
    ended.expect_success("nbdinfo")?;
    let info: Value = serde_json::from_slice(&ended.stdout)?;
    let export = &info["exports"][0];
    ensure!(export["contexts"][0] == "base:allocation", "{info}");
    let sizes = ["minimum", "preferred", "maximum"].map(|of| &export[format!("block_size_{of}")]);
    ensure!(sizes == [&json!(1), &json!(4096), &json!(32 << 20)], "{info}");
    ensure!(info["protocol"] == "newstyle-fixed" && info["structured"] == true, "{info}");
    ensure!(export["export-size"] == 25 << 20 && export["can_multi_conn"] == true, "{info}");
    ensure!(export["can_trim"] == true && export["can_fua"] == true, "{info}");
    let listed = run(
        Command::new("nbdinfo").args([
            "--list",
            "--json",
            &format!("nbd+unix://?socket={}", disk.socket.display()),
        ]),
        PATIENCE,
    )?;
    ensure!(listed.text().contains("\"export-name\": \"disk\""), "{}", listed.text());

    let (original, copy) = (cluster.file("original"), cluster.file("copy"));
    image(&original)?;
    // Four connections, many requests each.
    let mut copy_in = Command::new("nbdcopy");
    copy_in.args(["--connections=4", "--requests=32"]).arg(&original).arg(&uri);
    run(&mut copy_in, LONG)?.expect_success("nbdcopy to the volume")?;
    let mut copy_out = Command::new("qemu-img");
    copy_out.args(["convert", "-f", "raw", "-O", "raw", "-m", "8", &uri]).arg(&copy);
    run(&mut copy_out, LONG)?.expect_success("qemu-img convert")?;
    let (written, read) = (fs::read(&original)?, fs::read(&copy)?);
    ensure!(read.len() == 25 << 20 && read[..written.len()] == written[..], "another image");
    ensure!(read[written.len()..].iter().all(|byte| *byte == 0), "zeros are not zeros");
    let data = disk.stats()?["data_bytes"].as_u64().unwrap_or(u64::MAX);
    ensure!(data < 16 << 20, "{data} bytes are kept of 8 MiB and zeros");
    holes_are_told(&disk, &written)?;

    let steps = [
        "write -P 17 1000003 70001",
        "read -P 17 1000003 70001",
        "write -z 1010000 20000",
        "read -P 0 1010000 20000",
        "read -P 17 1030000 40004",
        "write -f -P 18 4095 2",
        "read -P 18 4095 2",
        "discard 8M 8M",
        "read -P 0 8M 8M",
        "flush",
    ];
    let mut io = Command::new("qemu-io");
    io.args(["-f", "raw"]).args(steps.iter().flat_map(|step| ["-c", step])).arg(&uri);
    let ended = run(&mut io, PATIENCE)?;
    ended.expect_success("qemu-io")?;
    let said = ended.text() + &ended.stderr;
    ensure!(!said.contains("failed") && !said.contains("rror"), "{said}");
    disk.delete()?;
    Ok(Outcome::Passed)
}

/// Clients learn which of what was written are holes, and make them in what they copy it to.
fn holes_are_told(disk: &Disk<'_>, written: &[u8]) -> anyhow::Result<()> {
    let mut data: Vec<(u64, u64)> = Vec::new();
    for (page, bytes) in (0..).zip(written.chunks(4096)) {
        match data.last_mut() {
            _ if bytes.iter().all(|byte| *byte == 0) => {}
            Some((start, length)) if *start + *length == page * 4096 => *length += 4096,
            _ => data.push((page * 4096, 4096)),
        }
    }
    let uri = disk.uri();
    let told = |client: &mut Command, start: &str, is_data: &dyn Fn(&Value) -> bool| {
        let ended = run(client.arg(&uri), PATIENCE)?;
        ended.expect_success("a map of the volume")?;
        let map: Vec<Value> = serde_json::from_slice(&ended.stdout)?;
        let field = |extent: &Value, name| extent[name].as_u64().context("a number");
        let extents = map.iter().filter(|extent| is_data(extent));
        let told: anyhow::Result<Vec<(u64, u64)>> =
            extents.map(|extent| Ok((field(extent, start)?, field(extent, "length")?))).collect();
        ensure!(told? == data, "it was told {map:?}");
        anyhow::Ok(())
    };
    let mut nbdinfo = Command::new("nbdinfo");
    told(nbdinfo.args(["--map", "--json"]), "offset", &|extent| extent["type"] == 0)?;
    let mut qemu = Command::new("qemu-img");
    let map = ["map", "--output=json", "-f", "raw"];
    told(qemu.args(map), "start", &|extent| extent["data"] == true)?;

    let sparse = disk.cluster.file("sparse");
    run(Command::new("nbdcopy").arg(&uri).arg(&sparse), LONG)?
        .expect_success("nbdcopy from the volume")?;
    let taken = fs::metadata(&sparse)?.blocks() * 512;
    ensure!(taken < 16 << 20, "the copy takes {taken} bytes");
    ensure!(fs::read(&sparse)?[..written.len()] == *written, "another image");
    Ok(())
}

/// A volume changes its size under a client, which finds it when it connects again.
pub(crate) fn one_is_resized_while_it_is_used(cluster: &Cluster) -> TestResult {
    if let Some(reason) = missing_any(&["qemu-img", "qemu-io", "nbdinfo"]) {
        return Ok(Outcome::Skipped(reason));
    }
    let disk = Disk::create(cluster, "disk", "24M", &[])?;
    let attached = std::os::unix::net::UnixStream::connect(&disk.socket)?;
    let io = |steps: &[&str]| -> anyhow::Result<()> {
        let mut io = Command::new("qemu-io");
        io.args(["-f", "raw"]).args(steps.iter().flat_map(|step| ["-c", step])).arg(disk.uri());
        let ended = run(&mut io, PATIENCE)?;
        ended.expect_success("qemu-io")?;
        ensure!(!ended.text().contains("failed"), "{steps:?}: {}", ended.text());
        Ok(())
    };
    let resize = |size: &str| {
        let mut resize = cluster.command("volume");
        run(resize.args(["resize", "disk", "--size", size]), PATIENCE)
    };
    let size = || -> anyhow::Result<String> {
        let ended = run(Command::new("nbdinfo").args(["--size", &disk.uri()]), PATIENCE)?;
        ended.expect_success("nbdinfo --size")?;
        Ok(ended.text().trim().to_owned())
    };
    io(&["write -P 5 20M 1M"])?;
    resize("40M")?.expect_success("hecaton volume resize")?;
    ensure!(size()? == (40 << 20).to_string(), "it did not grow");
    io(&["read -P 5 20M 1M", "read -P 0 21M 19M", "write -P 6 36M 4M"])?;
    let refused = resize("16M")?;
    ensure!(refused.status.code() == Some(1), "{}", refused.stderr);
    ensure!(refused.stderr.contains("5M") && refused.stderr.contains("40M"), "{}", refused.stderr);
    io(&["discard 36M 4M", "discard 20M 1M"])?;
    resize("16M")?.expect_success("hecaton volume resize")?;
    disk.kill()?;
    ensure!(size()? == (16 << 20).to_string(), "a successor has another size");
    cluster.eventually("it is told", PATIENCE, |_| Ok(disk.status()?["size_bytes"] == 16 << 20))?;
    drop(attached);
    disk.delete()?;
    Ok(Outcome::Passed)
}

/// Any number of clients read, or one writes; who is refused learns who has it.
pub(crate) fn many_read_or_one_writes(cluster: &Cluster) -> TestResult {
    if let Some(reason) = missing_any(&["qemu-io", "nbdinfo", "nbdcopy"]) {
        return Ok(Outcome::Skipped(reason));
    }
    let disk = Disk::create(cluster, "disk", "16M", &[])?;
    let read_only = cluster.file("disk.read-only");
    let read_only =
        disk.export(&["--read-only", "--nbd", &format!("unix:{}", read_only.display())])?;
    let attach = |uri: &str, options: &[&str]| {
        let mut io = Command::new("qemu-io");
        io.args(["-f", "raw"]).args(options).arg(uri).stdin(Stdio::piped()).stdout(Stdio::null());
        Running::spawn(&mut io)
    };
    let is_refused = |uri: &str, options: &[&str], holder: u32| -> anyhow::Result<()> {
        let mut io = Command::new("qemu-io");
        let ended = run(io.args(["-f", "raw"]).args(options).arg(uri), PATIENCE)?;
        let holder = format!("process {holder} (qemu-io)");
        ensure!(!ended.status.success() && ended.stderr.contains(&holder), "{}", ended.stderr);
        Ok(())
    };
    // The server sees the end of a client a moment after the client has ended.
    let end = |client: Running| {
        kill_dead(client.id());
        cluster.eventually("it has left", PATIENCE, |_| Ok(disk.stats()?["clients"] == 0))
    };
    let writer = attach(&disk.uri(), &["-c", "write -P 9 0 1M", "-c", "sleep 600000"])?;
    let pid = writer.id();
    cluster.eventually("it is told who writes", PATIENCE, |_| {
        let told = disk.status()?["stats"]["writer"].clone();
        Ok(told == format!("process {pid} (qemu-io)"))
    })?;
    is_refused(&disk.uri(), &["-c", "read 0 4k"], pid)?;
    is_refused(&read_only, &["-r", "-c", "read 0 4k"], pid)?;
    end(writer)?;

    let reader = attach(&read_only, &["-r", "-c", "read 0 512", "-c", "sleep 600000"])?;
    super::until_its_client_reads(|| disk.status())?;
    let info = run(Command::new("nbdinfo").args(["--json", &read_only]), PATIENCE)?;
    ensure!(info.text().contains("\"is_read_only\": true"), "{}", info.text());
    let copy = cluster.file("copy");
    run(Command::new("nbdcopy").arg(&read_only).arg(&copy), LONG)?
        .expect_success("nbdcopy beside another reader")?;
    ensure!(fs::read(&copy)?[..1 << 20] == vec![9; 1 << 20], "another image");
    is_refused(&disk.uri(), &["-c", "write 0 4k"], reader.id())?;
    end(reader)?;
    let ended = run(Command::new("nbdinfo").args(["--size", &disk.uri()]), PATIENCE)?;
    ended.expect_success("nbdinfo, when nobody reads any more")?;
    disk.delete()?;
    Ok(Outcome::Passed)
}

/// `unexport` names the attached client; `--force` cuts it off. Other exports and the data stay.
pub(crate) fn an_export_is_taken_back(cluster: &Cluster) -> TestResult {
    if let Some(reason) = missing_any(&["qemu-io", "nbdinfo"]) {
        return Ok(Outcome::Skipped(reason));
    }
    let disk = Disk::create(cluster, "disk", "16M", &[])?;
    let (nbd, drive) = (cluster.file("other.nbd"), cluster.file("disk.drive"));
    let at = format!("unix:{}", nbd.display());
    let drive_at = drive.display().to_string();
    let uri = disk.export(&["--nbd", &at])?;
    disk.export(&["--vhost-user", &drive_at])?;
    let tcp = disk.export(&["--nbd", "127.0.0.1:0", "--read-only"])?;
    let mut io = Command::new("qemu-io");
    io.args(["-f", "raw", "-c", "write -P 9 0 1M", "-c", "sleep 600000"]).arg(&uri);
    let writer = Running::spawn(io.stdin(Stdio::piped()).stdout(Stdio::null()))?;
    let pid = writer.id();
    cluster.eventually("it has written", PATIENCE, |_| {
        Ok(disk.status()?["stats"]["written_bytes"] == 1 << 20)
    })?;
    let holder = format!("process {pid} (qemu-io)");
    disk.refuses_to("unexport", &["--nbd", &at], &[&holder, "--force"])?;
    let mistaken = format!("{at}.not");
    disk.refuses_to("unexport", &["--nbd", &mistaken], &[&mistaken, &at])?;
    // Nobody is attached to these two.
    disk.unexport(&["--vhost-user", &drive_at])?;
    let port = tcp.trim_start_matches("nbd://").split('/').next().context("an address")?;
    disk.unexport(&["--nbd", port])?;
    ensure!(!drive.exists() && nbd.exists(), "another export has gone");
    disk.unexport(&["--nbd", &at, "--force"])?;
    ensure!(!nbd.exists(), "the socket of an export that was taken back is left");
    cluster
        .eventually("it is cut off", PATIENCE, |_| Ok(disk.status()?["stats"]["clients"] == 0))?;
    let exports = disk.status()?["exports"].clone();
    ensure!(exports.as_array().is_some_and(|exports| exports.len() == 1), "{exports}");
    kill_dead(pid);
    drop(writer);
    let read = |uri: &str| {
        let mut io = Command::new("qemu-io");
        run(io.args(["-r", "-f", "raw", "-c", "read -P 9 0 1M"]).arg(uri), PATIENCE)
    };
    read(&disk.uri())?.expect_success("reading at the export that stayed")?;
    // The place is free, also for a process that is another one by then.
    disk.kill()?;
    ensure!(disk.export(&["--nbd", &at])? == uri, "it is exported elsewhere");
    read(&uri)?.expect_success("reading at the export that came back")?;
    disk.delete()?;
    Ok(Outcome::Passed)
}

/// A volume spills to a file when the pool has no room, and takes the data back once room exists.
/// The test kills the volume's process in between.
pub(crate) fn the_rest_is_spilled_and_comes_back() -> TestResult {
    if let Some(reason) = missing_any(&["nbdcopy", "qemu-io"]) {
        return Ok(Outcome::Skipped(reason));
    }
    let cluster = Cluster::start(2, "64M")?;
    let spill = cluster.file("disk.spill");
    let path = spill.to_str().context("a path")?;
    let disk = Disk::create(&cluster, "disk", "160M", &["--spill", path])?;
    let (original, copy) = (cluster.file("original"), cluster.file("copy"));
    let mut bytes = vec![0u8; 160 << 20];
    let mut random = Random(13);
    bytes.chunks_mut(8).for_each(|word| word.copy_from_slice(&random.next().to_le_bytes()));
    fs::write(&original, &bytes)?;
    let uri = disk.uri();
    run(Command::new("nbdcopy").args(["--flush"]).arg(&original).arg(&uri), LONG)?
        .expect_success("nbdcopy to the volume")?;
    let spilled = || -> anyhow::Result<u64> {
        disk.status()?["stats"]["spilled_bytes"].as_u64().context("nothing is told of it")
    };
    // The pool has 128 MiB.
    cluster.eventually("the rest is told", PATIENCE, |_| Ok(spilled()? >= 32 << 20))?;
    ensure!(fs::metadata(&spill)?.blocks() * 512 >= 32 << 20, "the file has nothing");
    disk.kill()?;
    run(Command::new("nbdcopy").arg(&uri).arg(&copy), LONG)?
        .expect_success("nbdcopy from the volume")?;
    ensure!(fs::read(&copy)? == bytes, "another image");
    // Some of it is dropped; the rest has room.
    let mut io = Command::new("qemu-io");
    let dropped = run(io.args(["-f", "raw", "-c", "discard 0 96M"]).arg(&uri), PATIENCE)?;
    dropped.expect_success("qemu-io")?;
    cluster.eventually("all is back", PATIENCE, |_| Ok(spilled()? == 0))?;
    disk.kill()?;
    fs::remove_file(&copy)?;
    run(Command::new("nbdcopy").arg(&uri).arg(&copy), LONG)?
        .expect_success("nbdcopy from the volume")?;
    let copied = fs::read(&copy)?;
    ensure!(copied[96 << 20..] == bytes[96 << 20..], "another image");
    ensure!(copied[..96 << 20].iter().all(|byte| *byte == 0), "what was dropped is there");
    let stats = disk.stats()?;
    ensure!(stats["errors"] == 0, "{stats}");
    disk.delete()?;
    ensure!(!spill.exists(), "the spill file is left");
    cluster.wait_until_idle(PATIENCE)?;
    Ok(Outcome::Passed)
}

/// Donors are killed and fall silent while fio writes, and verifies: it notices nothing.
pub(crate) fn fio_verifies_while_donors_fail() -> TestResult {
    if let Some(reason) = no_fio()? {
        return Ok(Outcome::Skipped(reason));
    }
    let cluster = Cluster::start(3, "200M")?;
    let disk = Disk::create(&cluster, "disk", "128M", &["--mirror", "2"])?;
    let mut fio = fio_verify(&disk.uri(), cluster.log()?);
    let mut fio = start_writing(&mut fio, || disk.status())?;
    for turn in 0..3 {
        if turn > 0 {
            thread::sleep(Duration::from_millis(800));
        }
        let donor = cluster.donor(turn)?;
        if turn == 1 {
            kill_dead(donor);
        } else {
            signal(donor, Signal::STOP);
            thread::sleep(Duration::from_millis(1200));
            signal(donor, Signal::CONT);
        }
    }
    cluster.eventually("fio has written much", LONG, |_| {
        Ok(disk.stats()?["writes"].as_u64() > Some(1000))
    })?;
    end_fio(&mut fio).with_context(|| cluster.log_tail())?;
    let stats = disk.stats()?;
    ensure!(stats["errors"] == 0 && stats["unkept_bytes"] == 0, "{stats}");
    cluster.until_whole()?;
    disk.delete()?;
    cluster.wait_until_idle(PATIENCE)?;
    Ok(Outcome::Passed)
}

/// A client that connects again finds all that was answered, however often the process that serves
/// the volume is killed.
pub(crate) fn its_process_is_killed_under_a_client(cluster: &Cluster) -> TestResult {
    if let Some(reason) = missing_any(&["qemu-img", "nbdcopy"]) {
        return Ok(Outcome::Skipped(reason));
    }
    for options in [&["--mirror", "2"][..], &["--mirror", "2", "--encrypt"]] {
        is_killed_under_a_client(cluster, options)?;
    }
    Ok(Outcome::Passed)
}

fn is_killed_under_a_client(cluster: &Cluster, options: &[&str]) -> anyhow::Result<()> {
    let disk = Disk::create(cluster, "disk", "64M", options)?;
    let (original, copy) = (cluster.file("original"), cluster.file("copy"));
    let mut bytes = vec![0u8; 64 << 20];
    let mut random = Random(9);
    bytes.chunks_mut(8).for_each(|word| word.copy_from_slice(&random.next().to_le_bytes()));
    fs::write(&original, &bytes)?;
    // Slow enough to be killed in between.
    let target = format!(
        "driver=nbd,server.type=unix,server.path={},export=disk,reconnect-delay=30",
        disk.socket.display()
    );
    let mut convert = Command::new("qemu-img");
    convert
        .args(["convert", "-n", "--target-image-opts", "-r", "2M", "-m", "8", "-W", "-f", "raw"])
        .arg(&original)
        .arg(&target)
        .stdin(Stdio::null());
    let mut running = start_writing(&mut convert, || disk.status())?;
    for _ in 0..3 {
        disk.kill()?;
        super::until_more_is_written(|| disk.status())?;
    }
    let ended = running.wait(LONG, || Ok(()))?;
    ensure!(ended.success(), "qemu-img ended with {ended}\n    {}", cluster.log_tail());
    disk.kill()?;
    // It connects to the socket, which the node has kept, and waits in its queue.
    let mut copy_out = Command::new("nbdcopy");
    run(copy_out.arg(disk.uri()).arg(&copy), LONG)?.expect_success("nbdcopy from the volume")?;
    ensure!(fs::read(&copy)? == bytes, "another image");
    ensure!(disk.status()?["restarts"].as_u64() > Some(1), "it was not started again");
    disk.delete()
}

/// A silent donor has a write in its socket, and the client is told that the write failed. The
/// volume refuses reads and writes of these pages until it knows the outcome of that write.
pub(crate) fn a_write_to_a_silent_donor_is_settled() -> TestResult {
    if let Some(reason) = missing("qemu-io") {
        return Ok(Outcome::Skipped(reason));
    }
    let cluster = Cluster::start(1, "200M")?;
    let disk = Disk::create(&cluster, "disk", "16M", &["--donor-patience", "20"])?;
    let io = |step: &str| {
        let mut io = Command::new("qemu-io");
        run(io.args(["-f", "raw", "-c", step]).arg(disk.uri()), LONG)
    };
    io("write -P 1 0 128k")?.expect_success("a first write")?;
    let donor = cluster.donor(0)?;
    signal(donor, Signal::STOP);
    let failed = [io("write -P 2 0 64k"), io("write -P 4 0 4k"), io("read 0 4k")];
    signal(donor, Signal::CONT);
    for ended in failed {
        let ended = ended?;
        let said = ended.text() + &ended.stderr;
        ensure!(said.contains("Input/output error"), "it said {said:?}");
    }
    // The write that failed first arrives late. Reads of its pages fail until then.
    cluster.eventually("all is settled", PATIENCE, |_| {
        let ended = io("read -P 2 0 64k")?;
        let said = ended.text() + &ended.stderr;
        let is_settled = ended.status.success();
        ensure!(is_settled || said.contains("Input/output error"), "it said {said:?}");
        Ok(is_settled)
    })?;
    // And nothing after it.
    let stats = disk.stats()?;
    ensure!(stats["unsettled"] == 0 && stats["unkept_bytes"] == 0, "{stats}");
    for step in ["read -P 2 0 64k", "read -P 1 64k 64k", "write -P 3 0 4k", "read -P 3 0 4k"] {
        let ended = io(step)?;
        ended.expect_success(step)?;
        ensure!(!ended.text().contains("failed"), "{step}: {}", ended.text());
    }
    disk.delete()?;
    cluster.wait_until_idle(PATIENCE)?;
    Ok(Outcome::Passed)
}

/// Over TLS, an export serves only clients that show a certificate of the cluster for volumes.
/// The clients are libnbd's tools and QEMU.
pub(crate) fn over_tls_only_who_may_is_served(cluster: &Cluster) -> TestResult {
    if let Some(reason) = missing_any(&["nbdinfo", "nbdcopy", "qemu-img"]).or_else(no_libnbd) {
        return Ok(Outcome::Skipped(reason));
    }
    let disk = Disk::create(cluster, "over-tls", "16M", &[])?;
    let pki = |dir: &Path, arguments: &[&str]| -> anyhow::Result<()> {
        let mut pki = cluster.command("pki");
        let ended = run(pki.args(arguments).arg("--dir").arg(dir), PATIENCE)?;
        ended.expect_success("hecaton pki")
    };
    let (own, other) = (cluster.file("tls-pki"), cluster.file("tls-other-pki"));
    for authority in [&own, &other] {
        pki(authority, &["init"])?;
        pki(authority, &["issue", "alice", "--role", "client"])?;
    }
    pki(&own, &["issue", "carol", "--role", "client"])?;
    pki(
        &own,
        &["issue", "disks", "--role", "export", "--host", "localhost", "--host", "127.0.0.1"],
    )?;
    pki(&own, &["issue", "node-1", "--role", "node"])?;
    pki(&own, &["issue", "bob", "--role", "read-only"])?;
    let issued = |authority: &Path, name: &str| authority.join("issued").join(name);
    // The names by which clients look for them, which only role client is given.
    for name in ["node-1", "bob"] {
        for (file, known) in [
            ("ca.pem", "ca-cert.pem"),
            ("cert.pem", "client-cert.pem"),
            ("key.pem", "client-key.pem"),
        ] {
            std::os::unix::fs::symlink(file, issued(&own, name).join(known))?;
        }
    }
    let certificate = issued(&own, "disks").display().to_string();
    let uri = disk.export(&["--nbd", "127.0.0.1:0", "--tls", &certificate])?;
    ensure!(uri.starts_with("nbds://127.0.0.1:"), "{uri}");
    let with = |dir: &Path| format!("{uri}?tls-certificates={}", dir.display());
    let alice = issued(&own, "alice");

    let (original, copy) = (cluster.file("tls-original"), cluster.file("tls-copy"));
    let mut bytes = vec![0u8; 16 << 20];
    let mut random = Random(21);
    bytes.chunks_mut(8).for_each(|word| word.copy_from_slice(&random.next().to_le_bytes()));
    fs::write(&original, &bytes)?;
    let mut copy_in = Command::new("nbdcopy");
    copy_in.args(["--connections=4", "--requests=32"]).arg(&original).arg(with(&alice));
    run(&mut copy_in, LONG)?.expect_success("nbdcopy over TLS")?;
    let info = run(Command::new("nbdinfo").args(["--json", &with(&alice)]), PATIENCE)?;
    info.expect_success("nbdinfo over TLS")?;
    let info: Value = serde_json::from_slice(&info.stdout)?;
    ensure!(info["TLS"] == true && info["exports"][0]["is_read_only"] == false, "{info}");
    let port = uri.rsplit(':').next().and_then(|rest| rest.split('/').next()).context("a port")?;
    let qemu = |credentials: &Path| {
        let credentials = format!(
            "tls-creds-x509,id=tls0,dir={},endpoint=client,verify-peer=yes",
            credentials.display()
        );
        let image = format!("driver=nbd,host=127.0.0.1,port={port},export=over-tls,tls-creds=tls0");
        let mut convert = Command::new("qemu-img");
        convert.args(["convert", "-O", "raw", "--object", &credentials, "--image-opts", &image]);
        convert.arg(&copy);
        run(&mut convert, LONG)
    };
    qemu(&alice)?.expect_success("qemu-img convert over TLS")?;
    ensure!(fs::read(&copy)? == bytes, "another image");

    let is_refused = |uri: &str, said: &str| -> anyhow::Result<()> {
        let ended = run(Command::new("nbdinfo").arg(uri), PATIENCE)?;
        ensure!(!ended.status.success(), "{uri} was served: {}", ended.text());
        ensure!(ended.stderr.contains(said), "{uri}: {}", ended.stderr);
        Ok(())
    };
    // QEMU tells what the server says, libnbd's tools do not.
    let is_told = |name: &str, said: &str| -> anyhow::Result<()> {
        is_refused(&with(&issued(&own, name)), "not supported")?;
        let ended = qemu(&issued(&own, name))?;
        ensure!(!ended.status.success(), "{name} was served: {}", ended.text());
        ensure!(ended.stderr.contains(said), "{name}: {}", ended.stderr);
        Ok(())
    };
    is_told("node-1", "node `node-1` may not use volumes")?;
    is_refused(&uri.replace("nbds:", "nbd:"), "not supported")?;
    is_refused(&with(&issued(&other, "alice")), "")?;
    // A client that wants TLS, where there is none.
    let plain = disk.export(&["--nbd", "127.0.0.1:0"])?;
    let wanting =
        format!("{}?tls-certificates={}", plain.replace("nbd:", "nbds:"), alice.display());
    is_refused(&wanting, "")?;
    ensure!(!qemu(&issued(&other, "alice"))?.status.success(), "a stranger was served");
    // A client with the role `read-only` only reads, although the export is writable.
    let info =
        run(Command::new("nbdinfo").args(["--json", &with(&issued(&own, "bob"))]), PATIENCE)?;
    info.expect_success("nbdinfo of who only reads")?;
    ensure!(info.text().contains("\"is_read_only\": true"), "{}", info.text());
    // One writes, and another one learns who that is.
    let mut writer = Command::new(PYTHON);
    let hold = "import nbd, os, sys; h = nbd.NBD(); h.set_uri_allow_local_file(True)
h.connect_uri(os.environ['URI']); sys.stdin.read()";
    writer.args(["-c", hold]).env("URI", with(&alice)).stdin(Stdio::piped());
    let mut writer = Running::spawn(&mut writer)?;
    cluster.eventually("it is told who writes", PATIENCE, |_| {
        Ok(disk.status()?["stats"]["writer"] == "client `alice` at 127.0.0.1")
    })?;
    is_told("carol", "client `alice` at 127.0.0.1")?;
    drop(writer.child_mut().stdin.take());
    ensure!(writer.wait(PATIENCE, || Ok(()))?.success(), "the writer failed");
    // A revoked certificate is refused at once; no process is restarted for that.
    pki(&own, &["revoke", "bob"])?;
    is_refused(&with(&issued(&own, "bob")), "")?;
    run(Command::new("nbdinfo").arg(with(&alice)), PATIENCE)?.expect_success("nbdinfo")?;
    // Its process is another one, and shows the same.
    disk.kill()?;
    run(Command::new("nbdinfo").arg(with(&alice)), PATIENCE)?.expect_success("nbdinfo")?;
    disk.delete()?;
    Ok(Outcome::Passed)
}

/// Writes numbered pages to a volume's buffer, and prints each answered write and flush.
const NOTING_CLIENT: &str = r#"
import nbd, os, random
h = nbd.NBD()
h.connect_uri(os.environ["URI"])
random.seed(int(os.environ["SEED"]))
turn = 0
while True:
    turn += 1
    page = random.randrange(4000)
    h.pwrite(turn.to_bytes(8, "big") * 512, page * 4096)
    print("w", page, turn, flush=True)
    if turn % 32 == 0:
        h.flush()
        print("f", turn, flush=True)
"#;

/// The system's Python, for which the distribution packages libnbd's module. `nbdsh` takes the
/// first Python of the path.
const PYTHON: &str = "/usr/bin/python3";

fn no_libnbd() -> Option<String> {
    let has = run(Command::new(PYTHON).args(["-c", "import nbd"]), PATIENCE);
    let is_there = has.is_ok_and(|ended| ended.status.success());
    (!is_there).then(|| "Python has no module nbd: install python3-libnbd".to_owned())
}

/// Answered writes survive a kill of the volume's process, although donors do not have them yet.
/// The volume answers a flush when donors have the data.
pub(crate) fn what_is_buffered_outlives_the_process(cluster: &Cluster) -> TestResult {
    if let Some(reason) = missing_any(&["nbdcopy"]).or_else(no_libnbd) {
        return Ok(Outcome::Skipped(reason));
    }
    let disk = Disk::create(cluster, "buffered", "16M", &["--write-buffer", "1M"])?;
    let mut last = vec![0u64; 4096];
    for seed in 1..=5u64 {
        let said = cluster.file(&format!("buffered-{seed}"));
        let mut client = Command::new(PYTHON);
        client
            .args(["-c", NOTING_CLIENT])
            .env("URI", disk.uri())
            .env("SEED", seed.to_string())
            .stdin(Stdio::null())
            .stdout(fs::File::create(&said)?)
            .stderr(Stdio::null());
        let mut client = Running::spawn(&mut client)?;
        cluster.eventually("it has flushed", PATIENCE, |_| {
            Ok(fs::read_to_string(&said)?.lines().filter(|line| line.starts_with('f')).count() > 3)
        })?;
        disk.kill()?;
        let ended = client.wait(PATIENCE, || Ok(()))?;
        ensure!(!ended.success(), "it was not disturbed");
        let copy = cluster.file("buffered-copy");
        run(Command::new("nbdcopy").arg(disk.uri()).arg(&copy), LONG)?
            .expect_success("nbdcopy from the volume")?;
        let found = fs::read(&copy)?;
        // The number of the last turn that each page was answered for; one more may be on its way.
        let mut answered: Vec<Option<u64>> = vec![None; 4096];
        let mut turns = 0;
        for line in fs::read_to_string(&said)?.lines() {
            let words: Vec<&str> = line.split(' ').collect();
            if let ["w", page, turn] = words[..] {
                turns = turn.parse()?;
                answered[page.parse::<usize>()?] = Some(turns);
            }
        }
        for (page, contents) in found.chunks(4096).enumerate() {
            let (first, rest) = contents.split_first_chunk::<8>().context("a page")?;
            let number = u64::from_be_bytes(*first);
            ensure!(rest.chunks(8).all(|word| word == first), "half a page, {page}");
            let expected = answered[page].unwrap_or(last[page]);
            ensure!(
                number == expected || number == turns + 1,
                "page {page} has {number}, and {expected} was answered"
            );
            last[page] = number;
        }
    }
    ensure!(disk.status()?["restarts"].as_u64() >= Some(5), "it was not killed");
    disk.delete()?;
    cluster.wait_until_idle(PATIENCE)?;
    Ok(Outcome::Passed)
}

/// A snapshot stays the same when its volume changes or is deleted, and when its own process is
/// killed. No client can write to it.
pub(crate) fn a_snapshot_stays_as_it_is(cluster: &Cluster) -> TestResult {
    if let Some(reason) = missing_any(&["qemu-io", "nbdcopy", "nbdinfo"]) {
        return Ok(Outcome::Skipped(reason));
    }
    let disk = Disk::create(cluster, "snapped", "32M", &["--mirror", "2"])?;
    let io = |disk: &Disk<'_>, steps: &[&str]| {
        let mut io = Command::new("qemu-io");
        io.args(["-f", "raw"]).args(steps.iter().flat_map(|step| ["-c", step])).arg(disk.uri());
        run(&mut io, LONG)
    };
    let succeeds = |disk: &Disk<'_>, steps: &[&str]| -> anyhow::Result<()> {
        let ended = io(disk, steps)?;
        ended.expect_success("qemu-io")?;
        ensure!(!ended.text().contains("failed"), "{steps:?}: {}", ended.text());
        Ok(())
    };
    succeeds(&disk, &["write -P 1 0 8M", "write -P 2 20M 4M"])?;
    let monday = disk.snapshot("monday")?;
    succeeds(&disk, &["write -P 3 4M 8M", "discard 20M 2M"])?;
    let tuesday = disk.snapshot("tuesday")?;
    monday.kill()?;
    let of_monday = ["read -P 1 0 8M", "read -P 0 8M 12M", "read -P 2 20M 4M", "read -P 0 24M 8M"];
    let read_only = |disk: &Disk<'_>, steps: &[&str]| -> anyhow::Result<()> {
        let mut io = Command::new("qemu-io");
        io.args(["-r", "-f", "raw"]).args(steps.iter().flat_map(|step| ["-c", step]));
        let ended = run(io.arg(disk.uri()), LONG)?;
        ended.expect_success("qemu-io -r")?;
        ensure!(!ended.text().contains("failed"), "{steps:?}: {}", ended.text());
        Ok(())
    };
    read_only(&monday, &of_monday)?;
    let refused = io(&monday, &["write -P 9 0 4k"])?;
    ensure!(!refused.status.success() || refused.text().contains("failed"), "{}", refused.text());
    let mut status = cluster.command("volume");
    let status = run(status.args(["status", "monday"]), PATIENCE)?;
    ensure!(status.text().contains("a snapshot of snapped"), "{}", status.text());
    let cases: &[(&[&str], &str)] = &[
        (&["resize", "monday", "--size", "64M"], "snapshot"),
        (&["snapshot", "snapped", "monday"], "`monday`"),
        (&["snapshot", "nothing", "wednesday"], "`nothing`"),
    ];
    for (arguments, said) in cases {
        let ended = run(cluster.command("volume").args(*arguments), PATIENCE)?;
        ensure!(ended.status.code() == Some(1), "{arguments:?} ended with {}", ended.status);
        ensure!(ended.stderr.contains(said), "{arguments:?} said {:?}", ended.stderr);
    }
    disk.delete()?;
    read_only(&monday, &of_monday)?;
    let of_tuesday = ["read -P 1 0 4M", "read -P 3 4M 8M", "read -P 0 20M 2M", "read -P 2 22M 2M"];
    read_only(&tuesday, &of_tuesday)?;
    monday.delete()?;
    tuesday.delete()?;
    cluster.wait_until_idle(PATIENCE)?;
    Ok(Outcome::Passed)
}

/// Each of twenty volumes has what its own client has written, while all of them write.
pub(crate) fn twenty_are_used_at_once() -> TestResult {
    if let Some(reason) = missing("qemu-io") {
        return Ok(Outcome::Skipped(reason));
    }
    let cluster = Cluster::start(3, "300M")?;
    let names: [&'static str; 20] = [
        "v01", "v02", "v03", "v04", "v05", "v06", "v07", "v08", "v09", "v10", "v11", "v12", "v13",
        "v14", "v15", "v16", "v17", "v18", "v19", "v20",
    ];
    let disks: Vec<Disk<'_>> = names
        .into_iter()
        .map(|name| Disk::create(&cluster, name, "32M", &["--thin"]))
        .collect::<anyhow::Result<_>>()?;
    // When a command has ended, the manager already knows its result.
    let status = cluster.status()?;
    let told = status["nodes"][0]["volumes"].as_array().map_or(&[][..], Vec::as_slice);
    let exported =
        told.iter().filter(|one| one["exports"].as_array().is_some_and(|all| !all.is_empty()));
    ensure!(
        exported.count() == names.len(),
        "not all are told of: {}",
        status["nodes"][0]["volumes"]
    );
    let client = |disk: &Disk<'_>, steps: &[String]| {
        let mut io = Command::new("qemu-io");
        io.args(["-f", "raw"]).args(steps.iter().flat_map(|step| ["-c", step]));
        Running::spawn(io.arg(disk.uri()).stdin(Stdio::null()).stdout(Stdio::piped()))
    };
    let writing: Vec<Running> = disks
        .iter()
        .zip(1..)
        .map(|(disk, fill)| {
            let write = |at: u64| format!("write -P {} {at}M 1M", fill + at);
            client(disk, &(0..16).map(write).collect::<Vec<_>>())
        })
        .collect::<anyhow::Result<_>>()?;
    for mut client in writing {
        ensure!(client.wait(LONG, || Ok(()))?.success(), "a client failed: {}", cluster.log_tail());
    }
    for (disk, fill) in disks.iter().zip(1..) {
        let read = |at: u64| format!("read -P {} {at}M 1M", fill + at);
        let steps: Vec<String> = (0..16).map(read).collect();
        let mut io = Command::new("qemu-io");
        io.args(["-f", "raw"]).args(steps.iter().flat_map(|step| ["-c", step]));
        let ended = run(io.arg(disk.uri()), LONG)?;
        ended.expect_success("qemu-io")?;
        ensure!(!ended.text().contains("failed"), "{}: {}", disk.name, ended.text());
    }
    disks.into_iter().try_for_each(Disk::delete)?;
    cluster.wait_until_idle(PATIENCE)?;
    Ok(Outcome::Passed)
}

pub(crate) fn what_cannot_be_is_one_clear_line(cluster: &Cluster) -> TestResult {
    if let Some(reason) = missing("qemu-io") {
        return Ok(Outcome::Skipped(reason));
    }
    let disk = Disk::create(cluster, "disk", "16M", &[])?;
    let taken = TcpListener::bind("127.0.0.1:0")?;
    let taken = taken.local_addr()?.to_string();
    let file = cluster.file("file").display().to_string();
    let socket = format!("unix:{}", disk.socket.display());
    // A client that has chosen the export: for one that has not, there is a limit of time.
    let mut io = Command::new("qemu-io");
    io.args(["-r", "-f", "raw", "-c", "read 0 512", "-c", "sleep 600000"]).arg(disk.uri());
    let client = Running::spawn(io.stdin(Stdio::piped()).stdout(Stdio::null()))?;
    super::until_its_client_reads(|| disk.status())?;
    let cases: &[(&[&str], i32, &str)] = &[
        (&["create", "disk", "--size", "16M"], 1, "`disk`"),
        (&["create", "a/b", "--size", "16M"], 1, "`a/b`"),
        (&["create", "other", "--size", "5000"], 2, "5000"),
        (&["create", "other", "--size", "0"], 2, "0 bytes"),
        (&["create", "other", "--size", "2T"], 2, "1T"),
        (&["create", "other", "--size", "100G"], 2, "--thin"),
        (&["create", "other", "--size", "16M", "--mirror", "9"], 2, "9 copies"),
        (&["create", "other"], 2, "--size"),
        (&["create", "other", "--size", "16M", "--limit", "16M"], 2, "--spill"),
        (&["create", "other", "--size", "16M", "--spill", "x", "--limit", "1M"], 2, "1M"),
        (&["create", "other", "--size", "16M", "--spill", "/dev/null"], 1, "/dev/null"),
        (&["create", "other", "--size", "1T", "--spill", "/proc/x"], 2, "spill file"),
        (&["create", "other", "--size", "16M", "--write-buffer", "1G"], 2, "4M"),
        (&["export", "disk", "--nbd", "0.0.0.0:0", "--tls", "/none"], 1, "/none"),
        (&["export", "disk", "--vhost-user", "/a", "--tls", "/none"], 2, "--tls"),
        (&["export", "other", "--nbd", "127.0.0.1:0"], 1, "`other`"),
        (&["export", "disk", "--nbd", &taken], 1, &taken),
        (&["export", "disk", "--fuse", &file], 1, "--multi-writer"),
        (&["export", "disk", "--nbd", &socket], 1, &socket),
        (&["export", "disk", "--nbd", "0.0.0.0:0"], 2, "--insecure"),
        (&["export", "disk", "--nbd", "here"], 2, "`here`"),
        (&["export", "disk"], 2, "--vhost-user"),
        (&["export", "disk", "--nbd", "127.0.0.1:0", "--vhost-user", "/a"], 2, "--vhost-user"),
        (&["export", "disk", "--nbd", "vhost-user:/a"], 2, "`vhost-user:/a`"),
        (&["export", "disk", "--vhost-user", "/no/such/drive"], 1, "/no/such/drive"),
        (&["status", "other"], 1, "`other`"),
        (&["resize", "other", "--size", "32M"], 1, "`other`"),
        (&["resize", "disk", "--size", "5000"], 2, "5000"),
        (&["resize", "disk", "--size", "100G"], 2, "--thin"),
        (&["delete", "other"], 1, "`other`"),
        (&["delete", "disk"], 1, "in use by 1"),
    ];
    for (arguments, code, said) in cases {
        let ended = run(cluster.command("volume").args(*arguments), PATIENCE)?;
        let what = format!("{arguments:?} said {:?}", ended.stderr);
        ensure!(ended.status.code() == Some(*code), "{what} and ended with {}", ended.status);
        ensure!(ended.stderr.contains(said), "{what}, without {said}");
        ensure!(ended.stderr.lines().count() == 1, "{what}: not one line");
    }
    kill_dead(client.id());
    drop(client);
    // As thin as it is, it can be larger than the pool.
    let mut thin = cluster.command("volume");
    run(thin.args(["create", "thin", "--size", "100G", "--thin"]), PATIENCE)?
        .expect_success("hecaton volume create --thin")?;
    run(cluster.command("volume").args(["delete", "thin"]), PATIENCE)?
        .expect_success("hecaton volume delete")?;
    // The server may not have noticed yet that its client has gone.
    cluster.eventually("nobody is connected", PATIENCE, |_| {
        Ok(disk.status()?["stats"]["clients"] == 0)
    })?;
    disk.delete()?;
    Ok(Outcome::Passed)
}
