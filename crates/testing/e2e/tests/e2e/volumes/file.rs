//! Volumes as files under file systems, loop devices and programs, while processes are killed.

use crate::{
    harness::{
        Outcome, TestResult,
        cluster::{Cluster, LONG, PATIENCE, start_writing, succeed},
        fio::end_fio,
        process::{Running, kill_dead, missing, run},
    },
    volume::{Disk, delete},
};
use anyhow::{Context as _, ensure};
use hecaton_e2e::Random;
use serde_json::Value;
use std::{
    fs,
    os::unix::fs::{FileExt as _, MetadataExt as _},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

/// A volume that is a file. It is deleted by the test, which must find it unused.
struct FileDisk<'a> {
    cluster: &'a Cluster,
    name: &'static str,
    path: PathBuf,
}

impl<'a> FileDisk<'a> {
    fn create(
        cluster: &'a Cluster,
        name: &'static str,
        size: &str,
        options: &[&str],
    ) -> anyhow::Result<FileDisk<'a>> {
        let path = cluster.file(name);
        succeed(cluster.command("volume").args(["create", name, "--size", size]).args(options))?;
        succeed(cluster.command("volume").args(["export", name, "--fuse"]).arg(&path))?;
        Ok(FileDisk { cluster, name, path })
    }

    /// Its requests come through io_uring, where they can.
    fn over_uring(cluster: &'a Cluster, name: &'static str) -> anyhow::Result<FileDisk<'a>> {
        let path = cluster.file(name);
        succeed(cluster.command("volume").args(["create", name, "--size", "128M"]))?;
        let mut export = cluster.command("volume");
        succeed(export.args(["export", name, "--uring", "--fuse"]).arg(&path))?;
        Ok(FileDisk { cluster, name, path })
    }

    fn status(&self) -> anyhow::Result<Value> {
        let ended = succeed(self.cluster.command("volume").args(["status", self.name, "--json"]))?;
        Ok(serde_json::from_slice(&ended.stdout)?)
    }

    /// SIGKILL for the process that serves it. Returns when there is another.
    fn kill_server(&self) -> anyhow::Result<()> {
        let before = self.status()?;
        let pid = before["pid"].as_u64().with_context(|| format!("no process: {before}"))?;
        kill_dead(u32::try_from(pid)?);
        self.cluster.eventually("another process serves the volume", PATIENCE, |_| {
            let now = self.status()?;
            Ok(now["state"] == "serving" && now["pid"] != before["pid"])
        })
    }

    fn delete(self) -> anyhow::Result<()> {
        delete(self.cluster, self.name, PATIENCE)?;
        ensure!(!self.path.exists(), "the file of a deleted volume is left");
        Ok(())
    }
}

/// A loop device. It goes when this is dropped.
struct Loop(String);

impl Loop {
    fn new(file: &Path) -> anyhow::Result<Loop> {
        let mut losetup = Command::new("losetup");
        let ended = succeed(losetup.args(["--find", "--show", "--direct-io=on"]).arg(file))?;
        Ok(Loop(ended.text().trim().to_owned()))
    }

    fn read_only(file: &Path) -> anyhow::Result<Loop> {
        let mut losetup = Command::new("losetup");
        let ended = succeed(losetup.args(["--find", "--show", "--read-only"]).arg(file))?;
        Ok(Loop(ended.text().trim().to_owned()))
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = run(Command::new("losetup").args(["--detach", &self.0]), PATIENCE);
    }
}

/// A mounted file system. It goes when this is dropped.
struct Mounted(PathBuf);

impl Mounted {
    fn new(device: &Loop, at: PathBuf) -> anyhow::Result<Mounted> {
        succeed(Command::new("mount").arg(&device.0).arg(&at))?;
        Ok(Mounted(at))
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = run(Command::new("umount").arg(&self.0), PATIENCE);
    }
}

/// Many at once, past the page cache.
const DIRECT: &[&str] = &["--ioengine=libaio", "--direct=1", "--iodepth=32", "--bsrange=4k-512k"];

/// fio, which writes to the first 64 MiB of a file for so long. It logs its errors.
fn writing(disk: &FileDisk<'_>, engine: &[&str], seconds: u32) -> anyhow::Result<Command> {
    let mut fio = Command::new("fio");
    fio.args(["--name=v", "--rw=randwrite", "--size=64M", "--allow_file_create=0", "--time_based"])
        .arg(format!("--runtime={seconds}"))
        .args(engine)
        .arg(format!("--filename={}", disk.path.display()))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(disk.cluster.log()?);
    Ok(fio)
}

/// The same, which verifies. It closes the file and opens it again several times a second.
fn verifying(disk: &FileDisk<'_>, engine: &[&str], seconds: u32) -> anyhow::Result<Command> {
    let mut fio = writing(disk, engine, seconds)?;
    fio.args(["--io_size=256M", "--verify=crc32c", "--verify_backlog=512", "--verify_fatal=1"])
        .arg("--verify_state_save=0");
    Ok(fio)
}

/// Whether the kernel lets FUSE have io_uring, as this machine has it again when this is dropped.
struct UringParameter(String);

impl UringParameter {
    const PATH: &str = "/sys/module/fuse/parameters/enable_uring";

    fn new() -> anyhow::Result<UringParameter> {
        Ok(UringParameter(fs::read_to_string(Self::PATH)?.trim().to_owned()))
    }

    fn set(&self, value: &str) -> anyhow::Result<()> {
        fs::write(Self::PATH, value).with_context(|| format!("{} is not set", Self::PATH))
    }
}

impl Drop for UringParameter {
    fn drop(&mut self) {
        let _ = self.set(&self.0);
    }
}

/// How often the threads of a process that have this name have waited.
fn waits_of_threads(pid: u64, name: &str) -> anyhow::Result<u64> {
    let mut waits = 0;
    for thread in fs::read_dir(format!("/proc/{pid}/task"))? {
        let thread = thread?.path();
        if fs::read_to_string(thread.join("comm"))?.trim() == name {
            let status = fs::read_to_string(thread.join("status"))?;
            let of =
                |line: &str| line.strip_prefix("voluntary_ctxt_switches:")?.trim().parse().ok();
            waits += status.lines().find_map(of).unwrap_or(0u64);
        }
    }
    Ok(waits)
}

/// Why volumes cannot be files on this machine, or what a test lacks.
fn lacking(programs: &[&str]) -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        return Some("only root mounts".to_owned());
    }
    if !Path::new("/dev/fuse").exists() || !Path::new("/dev/loop-control").exists() {
        return Some("the kernel has no FUSE, or no loop devices".to_owned());
    }
    programs.iter().find_map(|program| missing(program))
}

/// File systems on a loop device over the file keep what is in them; trimmed, it goes.
pub(crate) fn file_systems_keep_their_files(cluster: &Cluster) -> TestResult {
    if let Some(reason) = lacking(&["losetup", "mkfs.ext4", "e2fsck"]) {
        return Ok(Outcome::Skipped(reason));
    }
    let kinds: &[(&str, &[&str], &[&str])] = &[
        ("ext4", &["mkfs.ext4", "-q"], &["e2fsck", "-fn"]),
        ("xfs", &["mkfs.xfs", "-q"], &["xfs_repair", "-n"]),
    ];
    let filesystems = fs::read_to_string("/proc/filesystems")?;
    let original = cluster.file("original");
    let mut bytes = vec![0u8; 60 << 20];
    let mut random = Random(21);
    bytes.chunks_mut(8).for_each(|word| word.copy_from_slice(&random.next().to_le_bytes()));
    fs::write(&original, &bytes)?;
    for (kind, make, check) in kinds {
        let is_known =
            filesystems.lines().any(|line| line.trim_start_matches("nodev") == format!("\t{kind}"));
        if !is_known || missing(make[0]).is_some() {
            println!("  without {kind}: this machine has not all of it");
            continue;
        }
        // The smallest that mkfs.xfs makes.
        let disk = FileDisk::create(cluster, "disk", "320M", &[])?;
        let point = cluster.dir("point")?;
        let device = Loop::new(&disk.path)?;
        succeed(Command::new(make[0]).args(&make[1..]).arg(&device.0))?;
        let mounted = Mounted::new(&device, point.clone())?;
        let held = || anyhow::Ok(fs::metadata(&disk.path)?.blocks() * 512);
        let empty = held()?;
        succeed(Command::new("cp").arg(&original).arg(point.join("copy")))?;
        let refused = run(disk.cluster.command("volume").args(["delete", disk.name]), PATIENCE)?;
        ensure!(refused.stderr.contains("in use"), "deleting said {:?}", refused.stderr);
        drop(mounted);
        succeed(Command::new(check[0]).args(&check[1..]).arg(&device.0))?;
        // Another loop device, and nothing of it in this host's cache.
        drop(device);
        disk.kill_server()?;
        let device = Loop::new(&disk.path)?;
        let mounted = Mounted::new(&device, point.clone())?;
        ensure!(fs::read(point.join("copy"))? == bytes, "{kind}: another file");
        let full = held()?;
        ensure!(full > empty + (55 << 20), "{kind}: {full} bytes are held, and were {empty}");
        fs::remove_file(point.join("copy"))?;
        // Until the journal has it, nothing is free; and XFS frees what was removed when it likes.
        disk.cluster.eventually("what was trimmed is free", PATIENCE, |_| {
            succeed(Command::new("sync").arg("--file-system").arg(&point))?;
            succeed(Command::new("fstrim").arg(&point))?;
            Ok(held()? < empty + (10 << 20))
        })?;
        drop(mounted);
        succeed(Command::new(check[0]).args(&check[1..]).arg(&device.0))?;
        drop(device);
        disk.delete()?;
    }
    Ok(Outcome::Passed)
}

/// fio verifies what it writes through each way to a file, while the server and a donor are killed.
/// Each goes after fio has written on since the one before.
pub(crate) fn fio_verifies_while_its_process_is_killed() -> TestResult {
    if let Some(reason) = lacking(&["fio"]) {
        return Ok(Outcome::Skipped(reason));
    }
    let cluster = Cluster::start(3, "200M")?;
    let disk = FileDisk::create(&cluster, "disk", "128M", &["--mirror", "2"])?;
    let mapped: &[&str] = &["--ioengine=mmap", "--bs=4k", "--fsync=64"];
    let buffered: &[&str] = &["--ioengine=psync", "--bsrange=512-64k"];
    for (turn, engine) in [DIRECT, mapped, buffered].into_iter().enumerate() {
        let mut fio = verifying(&disk, engine, 3600)?;
        let mut running = start_writing(&mut fio, || disk.status())?;
        for kill in 0..4 {
            match (kill, turn) {
                (3, 0) => kill_dead(cluster.donor(0)?),
                _ => disk.kill_server()?,
            }
            super::until_more_is_written(|| disk.status()).with_context(|| cluster.log_tail())?;
        }
        end_fio(&mut running).with_context(|| format!("{engine:?}: {}", cluster.log_tail()))?;
    }
    let status = disk.status()?;
    let stats = &status["stats"];
    ensure!(stats["errors"] == 0 && stats["unkept_bytes"] == 0, "{status}");
    ensure!(status["restarts"].as_u64() > Some(2), "{status}");
    disk.delete()?;
    cluster.wait_until_idle(PATIENCE)?;
    Ok(Outcome::Passed)
}

/// A file served through io_uring loses what is open with its server, and no data. A kernel without
/// io_uring for FUSE serves it like any other file.
pub(crate) fn requests_come_through_io_uring(cluster: &Cluster) -> TestResult {
    if let Some(reason) = lacking(&["fio"]) {
        return Ok(Outcome::Skipped(reason));
    }
    if !Path::new(UringParameter::PATH).exists() {
        return Ok(Outcome::Skipped("the kernel's FUSE has no io_uring (Linux 6.14)".to_owned()));
    }
    let parameter = UringParameter::new()?;
    parameter.set("N")?;
    let disk = FileDisk::over_uring(cluster, "without")?;
    let has_uring = |disk: &FileDisk<'_>| anyhow::Ok(disk.status()?["exports"][0]["uring"] == true);
    cluster.eventually("it is known to be without", PATIENCE, |_| Ok(!has_uring(&disk)?))?;
    let open = fs::OpenOptions::new().read(true).write(true).open(&disk.path)?;
    open.write_all_at(&[5; 8192], 0)?;
    disk.kill_server()?;
    open.write_all_at(&[6; 4096], 4096)?;
    open.sync_all()?;
    drop(open);
    let read = fs::read(&disk.path)?;
    ensure!(read[..4096] == [5; 4096] && read[4096..8192] == [6; 4096], "it holds something else");
    disk.delete()?;

    parameter.set("Y")?;
    let disk = FileDisk::over_uring(cluster, "disk")?;
    let kept: Vec<u8> = (0..32u32 << 20).map(|at| (at / 4096 + at) as u8).collect();
    let open = fs::OpenOptions::new().read(true).write(true).open(&disk.path)?;
    open.write_all_at(&kept, 64 << 20)?;
    open.sync_all()?;
    let verify = |seconds| Running::spawn(&mut verifying(&disk, DIRECT, seconds)?);
    let ended = verify(2)?.wait(LONG, || Ok(()))?;
    ensure!(ended.success(), "fio ended with {ended}\n    {}", cluster.log_tail());
    let status = disk.status()?;
    let pid = status["pid"].as_u64().with_context(|| format!("no process: {status}"))?;
    let waits = |name| waits_of_threads(pid, name);
    let (over_uring, by_reading) = (waits("fuse-uring")?, waits("fuse")?);
    ensure!(over_uring > 10 * by_reading, "{over_uring} requests, and {by_reading} by reading");
    let shown = run(cluster.command("volume").args(["status", "disk"]), PATIENCE)?;
    ensure!(shown.text().contains("through io_uring"), "{}", shown.text());

    let mut fio = writing(&disk, DIRECT, 60)?;
    let fio = fio.args(["--io_size=1T", "--norandommap"]);
    let mut running = start_writing(fio, || disk.status())?;
    disk.kill_server()?;
    let ended = running.wait(LONG, || Ok(()))?;
    ensure!(!ended.success(), "the kernel has kept what the killed process had");
    ensure!(open.read_at(&mut [0; 4096], 0).is_err(), "what was open is served on");
    drop(open);
    // The file can be opened again, and still holds the data that was synced.
    let file = fs::File::open(&disk.path)?;
    let mut read = vec![0; kept.len()];
    file.read_exact_at(&mut read, 64 << 20)?;
    ensure!(read == kept, "it holds something else than was written");
    drop(file);
    let ended = verify(1)?.wait(LONG, || Ok(()))?;
    ensure!(ended.success(), "fio ended with {ended}\n    {}", cluster.log_tail());
    let status = disk.status()?;
    ensure!(has_uring(&disk)? && status["stats"]["errors"] == 0, "{status}");
    disk.delete()?;
    cluster.wait_until_idle(PATIENCE)?;
    Ok(Outcome::Passed)
}

/// A snapshot is a read-only file beside other exports; a volume exported read-only has no writer.
pub(crate) fn nobody_writes_where_all_may_read(cluster: &Cluster) -> TestResult {
    if let Some(reason) = lacking(&["losetup", "mkfs.ext4", "qemu-img", "qemu-io"]) {
        return Ok(Outcome::Skipped(reason));
    }
    let disk = Disk::create(cluster, "disk", "64M", &["--mirror", "2"])?;
    let image = cluster.file("image");
    let source = cluster.dir("source")?;
    fs::write(source.join("words"), "as it was")?;
    let mut make = Command::new("mkfs.ext4");
    succeed(make.args(["-q", "-d"]).arg(&source).arg(&image).arg("64M"))?;
    let bytes = fs::read(&image)?;
    let mut copy = Command::new("qemu-img");
    succeed(copy.args(["convert", "-n", "-f", "raw", "-O", "raw"]).arg(&image).arg(disk.uri()))?;
    let monday = disk.snapshot("monday")?;
    let path = cluster.file("monday");
    let shown = path.display().to_string();
    monday.export(&["--fuse", &shown])?;
    let other = cluster.file("monday-too").display().to_string();
    monday.export(&["--fuse", &other, "--read-only"])?;
    ensure!(fs::metadata(&path)?.mode() & 0o777 == 0o400, "{:?}", fs::metadata(&path)?);
    for refused in ["echo >>\"$1\"", "chmod 666 \"$1\"", "fallocate -p -l 4096 \"$1\""] {
        let mut shell = Command::new("sh");
        let ended = run(shell.args(["-c", refused, "sh", &shown]).stdin(Stdio::null()), PATIENCE)?;
        ensure!(!ended.status.success(), "{refused} was possible");
        ensure!(ended.stderr.contains("Read-only file system"), "{refused}: {}", ended.stderr);
    }
    let open = fs::File::open(&path)?;
    let before = monday.pid()?;
    kill_dead(before);
    ensure!(fs::read(&path)? == bytes, "another image");
    ensure!(fs::read(&other)? == bytes, "another image at the other place");
    drop(open);
    // A file system on it, as on a disk that cannot be written.
    let point = cluster.dir("point")?;
    let device = Loop::read_only(&path)?;
    succeed(Command::new("mount").args(["-o", "ro,noload"]).arg(&device.0).arg(&point))?;
    let mounted = Mounted(point.clone());
    ensure!(fs::read(point.join("words"))? == b"as it was", "another file");
    drop((mounted, device));
    // NBD clients read beside it.
    let mut io = Command::new("qemu-io");
    succeed(io.args(["-r", "-f", "raw", "-c", "read 0 64M"]).arg(monday.uri()))?;

    let file = cluster.file("disk-file").display().to_string();
    let socket = disk.uri();
    let socket = socket.rsplit('=').next().context("no socket")?;
    disk.refuses(&["--fuse", &file, "--read-only"], &[socket, "--read-only"])?;
    monday.delete()?;
    disk.delete()?;
    ensure!(!path.exists(), "the file of a deleted volume is left");

    let mut create = cluster.command("volume");
    succeed(create.args(["create", "read", "--size", "16M"]))?;
    let export = |options: &[&str]| {
        run(cluster.command("volume").args(["export", "read"]).args(options), PATIENCE)
    };
    export(&["--fuse", &file, "--read-only"])?.expect_success("a file that is read only")?;
    let refused = export(&["--nbd", "127.0.0.1:0"])?;
    ensure!(
        refused.status.code() == Some(1) && refused.stderr.contains(&file),
        "{}",
        refused.stderr
    );
    export(&["--nbd", "127.0.0.1:0", "--read-only"])?.expect_success("a second reader")?;
    let status = run(cluster.command("volume").args(["status", "read"]), PATIENCE)?;
    ensure!(status.text().contains(&format!("{file}, read only")), "{}", status.text());
    succeed(cluster.command("volume").args(["delete", "read"]))?;
    cluster.wait_until_idle(PATIENCE)?;
    Ok(Outcome::Passed)
}

/// Holes, sizes and times are those of a file that always has one size.
pub(crate) fn it_is_a_file_of_one_size(cluster: &Cluster) -> TestResult {
    if let Some(reason) = lacking(&["fallocate"]) {
        return Ok(Outcome::Skipped(reason));
    }
    let disk = FileDisk::create(cluster, "disk", "64M", &["--multi-writer"])?;
    let path = disk.path.display().to_string();
    let shell = |script: &str| {
        run(Command::new("sh").args(["-c", script, "sh", &path]).stdin(Stdio::null()), PATIENCE)
    };
    let meta = || fs::metadata(&disk.path);
    ensure!(meta()?.len() == 64 << 20 && meta()?.blocks() == 0, "{:?}", meta()?);
    let mut image = vec![7u8; (8 << 20) + 100];
    image[1 << 20..2 << 20].fill(0);
    fs::write(cluster.file("image"), &image)?;
    // O_TRUNC, as cp opens it, drops nothing of the size.
    succeed(Command::new("cp").arg("--sparse=never").arg(cluster.file("image")).arg(&disk.path))?;
    let read = fs::read(&disk.path)?;
    ensure!(read.len() == 64 << 20 && read[..image.len()] == image, "another image");
    ensure!(read[image.len()..].iter().all(|byte| *byte == 0), "zeros are not zeros");
    // cp finds the hole, by SEEK_DATA and SEEK_HOLE.
    let copy = cluster.file("copy");
    succeed(Command::new("cp").arg("--sparse=auto").arg(&disk.path).arg(&copy))?;
    ensure!(fs::metadata(&copy)?.blocks() * 512 < 9 << 20, "the copy has no holes");
    ensure!(fs::read(&copy)? == read, "the copy is another");
    let punch = "fallocate --punch-hole --offset 2097000 --length 4194304 \"$1\"";
    shell(punch)?.expect_success("fallocate --punch-hole")?;
    let read = fs::read(&disk.path)?;
    image[2_097_000..2_097_000 + 4_194_304].fill(0);
    ensure!(read[..image.len()] == image, "a punched hole is another");
    ensure!(meta()?.blocks() * 512 < 5 << 20, "{} blocks after it", meta()?.blocks());
    shell("fallocate --zero-range --offset 0 --length 65536 \"$1\"")?
        .expect_success("fallocate --zero-range")?;
    ensure!(fs::read(&disk.path)?[..65536].iter().all(|byte| *byte == 0), "not zeros");
    for refused in ["truncate --size=1M \"$1\"", "chmod 666 \"$1\"", "fallocate --length 1M \"$1\""]
    {
        ensure!(!shell(refused)?.status.success(), "{refused} was possible");
    }
    ensure!(meta()?.len() == 64 << 20 && meta()?.mode() & 0o777 == 0o600, "{:?}", meta()?);

    fs::write(cluster.file("full"), "somebody's")?;
    let (full, dir) = (cluster.file("full"), cluster.dir("somebodys")?);
    let places = [full.clone(), dir, disk.path.clone(), cluster.file("none/disk")];
    for place in &places {
        let mut export = cluster.command("volume");
        let ended = run(export.args(["export", "disk", "--fuse"]).arg(place), PATIENCE)?;
        ensure!(ended.status.code() == Some(1), "{}: {}", place.display(), ended.status);
        let said = ended.stderr;
        ensure!(said.contains(&*place.to_string_lossy()) && said.lines().count() == 1, "{said}");
    }
    ensure!(fs::read(full)? == b"somebody's", "somebody's file is another");
    // A file of somebody's that was empty stays.
    let empty = cluster.file("empty-file");
    fs::write(&empty, "")?;
    succeed(cluster.command("volume").args(["export", "disk", "--fuse"]).arg(&empty))?;
    ensure!(fs::metadata(&empty)?.len() == 64 << 20, "it is not the volume");
    let open = fs::File::open(&empty)?;
    let refused = run(cluster.command("volume").args(["delete", "disk"]), PATIENCE)?;
    ensure!(refused.stderr.contains("empty-file"), "deleting said {:?}", refused.stderr);
    drop(open);
    disk.delete()?;
    ensure!(fs::metadata(&empty)?.len() == 0, "a place that was there is not what it was");
    Ok(Outcome::Passed)
}

/// A program with the file open sees a resize at once, a loop device when it is told to look.
pub(crate) fn it_has_another_size_as_it_is_used(cluster: &Cluster) -> TestResult {
    if let Some(reason) = lacking(&["losetup", "blockdev"]) {
        return Ok(Outcome::Skipped(reason));
    }
    let disk = FileDisk::create(cluster, "disk", "16M", &[])?;
    let device = Loop::new(&disk.path)?;
    let resize = |size: &str| {
        succeed(cluster.command("volume").args(["resize", "disk", "--size", size])).map(drop)
    };
    let look = || -> anyhow::Result<u64> {
        succeed(Command::new("losetup").args(["--set-capacity", &device.0]))?;
        let ended = succeed(Command::new("blockdev").args(["--getsize64", &device.0]))?;
        Ok(ended.text().trim().parse()?)
    };
    let open = fs::OpenOptions::new().read(true).write(true).open(&disk.path)?;
    ensure!(open.metadata()?.len() == 16 << 20 && look()? == 16 << 20, "{:?}", open.metadata()?);
    resize("32M")?;
    cluster.eventually("it is larger", PATIENCE, |_| Ok(open.metadata()?.len() == 32 << 20))?;
    open.write_all_at(&[5; 4096], 20 << 20)?;
    open.sync_all()?;
    ensure!(look()? == 32 << 20, "the loop device is of {} bytes", look()?);
    let mut page = [0; 4096];
    fs::File::open(&device.0)?.read_exact_at(&mut page, 20 << 20)?;
    ensure!(page == [5; 4096], "another page");
    resize("24M")?;
    cluster.eventually("it is smaller", PATIENCE, |_| Ok(open.metadata()?.len() == 24 << 20))?;
    ensure!(look()? == 24 << 20, "the loop device is of {} bytes", look()?);
    ensure!(open.read_at(&mut page, 24 << 20)? == 0, "something is behind the end");
    drop((open, device));
    disk.delete()?;
    Ok(Outcome::Passed)
}

/// Users of the file are named, or lose it by force; written data stays, in the page cache or not.
pub(crate) fn an_export_is_taken_back(cluster: &Cluster) -> TestResult {
    if let Some(reason) = lacking(&["losetup"]) {
        return Ok(Outcome::Skipped(reason));
    }
    let disk = FileDisk::create(cluster, "disk", "16M", &[])?;
    let unexport = |options: &[&str]| {
        let mut unexport = cluster.command("volume");
        let path = disk.path.display().to_string();
        run(unexport.args(["unexport", "disk", "--fuse", &path]).args(options), PATIENCE)
    };
    let export =
        || succeed(cluster.command("volume").args(["export", "disk", "--fuse"]).arg(&disk.path));
    let open = fs::OpenOptions::new().read(true).write(true).open(&disk.path)?;
    open.write_all_at(&[9; 1 << 20], 0)?;
    let held_by = |holder: &str| -> anyhow::Result<()> {
        let refused = unexport(&[])?;
        ensure!(refused.status.code() == Some(1), "it was taken from {holder}");
        let said = &refused.stderr;
        ensure!(said.contains(holder) && said.contains("--force"), "{said}");
        ensure!(said.lines().count() == 1, "not one line: {said}");
        Ok(())
    };
    held_by(&format!("process {} (", std::process::id()))?;
    drop(open);
    let device = Loop::new(&disk.path)?;
    held_by(&format!("the loop device {}", device.0))?;
    drop(device);
    // The kernel lets go of it a moment later.
    cluster.eventually("nobody uses it", PATIENCE, |_| Ok(unexport(&[])?.status.success()))?;
    ensure!(!disk.path.exists(), "the file of an export that was taken back is left");
    let gone = unexport(&[])?;
    ensure!(gone.stderr.contains("exported nowhere"), "{}", gone.stderr);

    export()?;
    let file = fs::File::open(&disk.path)?;
    let mut read = vec![0; 1 << 20];
    file.read_exact_at(&mut read, 0)?;
    ensure!(read == vec![9; 1 << 20], "it holds something else than was written");
    unexport(&["--force"])?.expect_success("hecaton volume unexport --force")?;
    ensure!(file.read_at(&mut read, 8 << 20).is_err(), "it is served on");
    ensure!(!disk.path.exists(), "the file is left");
    drop(file);
    export()?;
    ensure!(fs::read(&disk.path)?[..1 << 20] == vec![9; 1 << 20], "another image");
    disk.delete()?;
    Ok(Outcome::Passed)
}
