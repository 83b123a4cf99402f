//! Volumes as drives of emulated machines: over vhost-user and NBD, with nothing of Hecaton in the
//! guest, and attached by the guest's own kernel.
//!
//! Scripts name `mkfs.ext4` and `/bin/nbd-client`: busybox has an `mke2fs` and an `nbd-client` of
//! its own.

use crate::{
    harness::{
        Outcome, TestResult,
        cluster::{Cluster, LONG, PATIENCE},
        guest::{
            GUEST_PATIENCE, Guests, Machine, Qemu, Spec,
            archive::{archive, installed},
        },
        process::{Stopped, kill_dead, missing_any, run},
        wait::until,
    },
    volume::Disk,
};
use anyhow::{Context as _, ensure};
use hecaton_e2e::Random;
use std::{fs, path::PathBuf, process::Command};

/// Arguments of QEMU for a drive over vhost-user, which connects again when it has to.
fn drive(cluster: &Cluster, disk: &Disk<'_>, id: &str, qemu: Qemu) -> anyhow::Result<[String; 4]> {
    let path = export(cluster, disk, id, &[])?;
    Ok(drive_at(&path, id, qemu))
}

/// Has a volume served to machine monitors, and returns the socket.
fn export(
    cluster: &Cluster,
    disk: &Disk<'_>,
    id: &str,
    options: &[&str],
) -> anyhow::Result<String> {
    let socket = cluster.file(&format!("{id}.vhost"));
    let path = socket.display().to_string();
    let said = disk.export(&[&["--vhost-user", &path], options].concat())?;
    ensure!(said == format!("vhost-user:{path}"), "export says {said}");
    Ok(path)
}

fn drive_at(path: &str, id: &str, qemu: Qemu) -> [String; 4] {
    let reconnect = match qemu {
        Qemu::Installed => "reconnect=1",
        Qemu::Backports => "reconnect-ms=200",
    };
    [
        "-chardev".to_owned(),
        format!("socket,id={id},path={path},{reconnect}"),
        "-device".to_owned(),
        format!("vhost-user-blk-pci,chardev={id},num-queues=2"),
    ]
}

/// Fills a file system of each kind before a reboot, and finds all of it after.
const FILE_SYSTEMS: &str = r#"
load xfs
big=/mnt/big; mkdir $big
check() { (cd $1 && md5sum -c -s sums) || exit 1; }
if mount -t ext4 /dev/vda /mnt 2>/dev/null; then
  mkdir -p $big; mount -t xfs /dev/vdb $big || exit 1
  check /mnt; check $big
  umount $big; umount /mnt
  e2fsck -fn /dev/vda >/dev/null 2>&1 || exit 1
  xfs_repair -n /dev/vdb >/dev/null 2>&1 || exit 1
  exit 0
fi
rmdir $big
mkfs.ext4 -q /dev/vda && mount -t ext4 /dev/vda /mnt && mkdir $big || exit 1
mkfs.xfs -q /dev/vdb && mount -t xfs /dev/vdb $big || exit 1
fill() {
  i=0
  while [ $i -lt $2 ]; do
    dd if=/dev/urandom of=$1/f$i bs=64k count=16 2>/dev/null || exit 1
    (cd $1; md5sum f$i >>sums)
    echo guest: filled $1 $i
    [ $((i % 4)) != 0 ] || sync
    i=$((i + 1))
  done
}
fill /mnt 20
fill $big 6
rm /mnt/f5 $big/f5; sed -i /f5/d /mnt/sums $big/sums
sync; fstrim /mnt; fstrim $big
echo 3 >/proc/sys/vm/drop_caches
check /mnt; check $big
umount $big; umount /mnt
echo guest: full
reboot -f
"#;

/// The process that serves a drive is killed again and again as a guest fills it, a donor too. The
/// guest notices nothing, and finds all of it after a reboot.
pub(crate) fn file_systems_outlive_what_is_killed(guests: &Guests) -> TestResult {
    let cluster = Cluster::start(3, "400M")?;
    let small = Disk::create(&cluster, "small", "96M", &["--mirror", "2"])?;
    let big = Disk::create(&cluster, "big", "320M", &["--mirror", "2"])?;
    let mut arguments = drive(&cluster, &small, "small", Qemu::Backports)?.to_vec();
    arguments.extend(drive(&cluster, &big, "big", Qemu::Backports)?);
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let spec = Spec { script: FILE_SYSTEMS, arguments: &arguments, ..Spec::default() };
    let mut machine = Machine::start_alone(&cluster, guests, &spec)?;
    // As it begins to write all of it back.
    for at in [4, 8, 12, 16] {
        machine.wait_for(&format!("guest: filled /mnt {at}"))?;
        small.kill()?;
    }
    machine.wait_for("guest: filled /mnt/big 2")?;
    kill_dead(cluster.donor(0)?);
    big.kill()?;
    machine.wait_for("guest: full")?;
    machine.wait_for("guest: ready")?;
    // While it boots, and its firmware and kernel set their queues up.
    small.kill()?;
    machine.succeed()?;
    for disk in [&small, &big] {
        let stats = disk.stats()?;
        ensure!(stats["errors"] == 0 && stats["unkept_bytes"] == 0, "{stats}");
    }
    ensure!(small.status()?["restarts"].as_u64() == Some(5), "{}", small.status()?);
    for disk in [small, big] {
        cluster.eventually("nobody is connected", LONG, |_| {
            Ok(disk.status()?["stats"]["clients"] == 0)
        })?;
        disk.delete()?;
    }
    cluster.wait_until_idle(LONG)?;
    Ok(Outcome::Passed)
}

/// Fills a file system and reads it back from the drive.
const FILL: &str = r#"
mkfs.ext4 -q /dev/vda && mount -t ext4 /dev/vda /mnt && cd /mnt || exit 1
dd if=/dev/urandom of=data bs=64k count=384 2>/dev/null && md5sum data >sums || exit 1
sync; echo 3 >/proc/sys/vm/drop_caches
md5sum -c -s sums && cd / && umount /mnt && e2fsck -fn /dev/vda >/dev/null 2>&1
"#;

/// The paper's driver domain: the host has the volumes, each of two guests a drive.
pub(crate) fn two_machines_know_nothing_of_it(cluster: &Cluster, guests: &Guests) -> TestResult {
    let one = Disk::create(cluster, "one", "64M", &[])?;
    let other = Disk::create(cluster, "other", "64M", &[])?;
    let arguments = drive(cluster, &one, "one", Qemu::Installed)?;
    let mut vhost: Vec<&str> = arguments.iter().map(String::as_str).collect();
    vhost.push("-no-reboot");
    let qemu = Qemu::Installed;
    let spec = Spec { name: "one", script: FILL, arguments: &vhost, qemu, ..Spec::default() };
    let mut first = Machine::start_alone(cluster, guests, &spec)?;
    let nbd = format!("file={},if=virtio,format=raw", other.uri());
    let nbd = ["-no-reboot", "-drive", &nbd];
    let spec = Spec { name: "other", script: FILL, arguments: &nbd, ..Spec::default() };
    let mut second = Machine::start_alone(cluster, guests, &spec)?;
    first.succeed()?;
    second.succeed()?;
    for disk in [one, other] {
        cluster.eventually("nobody is connected", LONG, |_| {
            Ok(disk.status()?["stats"]["clients"] == 0)
        })?;
        let stats = disk.stats()?;
        ensure!(
            stats["errors"] == 0 && stats["written_bytes"].as_u64() > Some(24 << 20),
            "{stats}"
        );
        disk.delete()?;
    }
    cluster.wait_until_idle(LONG)?;
    Ok(Outcome::Passed)
}

/// Four writers with requests of all sizes under way, and all that they have written is read again
/// and compared.
const FIO: &str = r#"
export LD_LIBRARY_PATH=/tmp/f PATH=/tmp/f:$PATH
fio --name=v --filename=/dev/vda --thread --ioengine=libaio --iodepth=16 --direct=1 --numjobs=4 --size=20M \
  --offset_increment=24M --rw=randwrite --bsrange=512-128k --verify=crc32c --verify_fatal=1 \
  --verify_state_save=0 >/tmp/said 2>&1 || { tail -5 /tmp/said; exit 1; }
"#;

/// fio in a guest whose drive is a volume over vhost-user; its process is killed meanwhile.
pub(crate) fn fio_verifies_in_a_guest(cluster: &Cluster, guests: &Guests) -> TestResult {
    if let Some(reason) = missing_any(&["tar", "ldd", "fio"]) {
        return Ok(Outcome::Skipped(reason));
    }
    let archive = archive(cluster, "f", &[&installed("fio")?], FIO)?;
    let disk = Disk::create(cluster, "disk", "96M", &["--mirror", "2"])?;
    let mut arguments = drive(cluster, &disk, "disk", Qemu::Backports)?.to_vec();
    arguments.push("-drive".to_owned());
    arguments.push(format!("file={},if=virtio,format=raw,readonly=on", archive.display()));
    let mut arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    arguments.push("-no-reboot");
    let spec = Spec {
        name: "disk",
        memory: "800M",
        script: "tar -xf /dev/vdb -C /tmp && . /tmp/f/script",
        arguments: &arguments,
        ..Spec::default()
    };
    let mut machine = Machine::start_alone(cluster, guests, &spec)?;
    let written = |bytes: u64| {
        cluster.eventually("fio writes", GUEST_PATIENCE, |_| {
            Ok(disk.stats()?["written_bytes"].as_u64() > Some(bytes))
        })
    };
    written(16 << 20)?;
    disk.kill()?;
    machine.succeed()?;
    let stats = disk.stats()?;
    ensure!(stats["errors"] == 0 && stats["unkept_bytes"] == 0, "{stats}");
    ensure!(disk.status()?["restarts"].as_u64() == Some(1), "{}", disk.status()?);
    cluster
        .eventually("nobody is connected", LONG, |_| Ok(disk.status()?["stats"]["clients"] == 0))?;
    disk.delete()?;
    fs::remove_file(archive)?;
    cluster.wait_until_idle(LONG)?;
    Ok(Outcome::Passed)
}

/// Two machines have one drive, which they are told is read only; nobody writes it in another way
/// meanwhile.
pub(crate) fn two_machines_read_what_neither_writes(
    cluster: &Cluster,
    guests: &Guests,
) -> TestResult {
    let disk = Disk::create(cluster, "shared", "64M", &[])?;
    let (random, sum) = random_file(cluster, 64 << 20)?;
    let copied = run(Command::new("nbdcopy").arg(&random).arg(disk.uri()), LONG)?;
    copied.expect_success("nbdcopy to the volume")?;
    let path = export(cluster, &disk, "shared", &["--read-only"])?;
    let script = format!(
        "[ $(cat /sys/block/vda/ro) = 1 ] || exit 1
        [ $(cat /sys/block/vda/queue/discard_max_bytes) = 0 ] || exit 1
        dd if=/dev/zero of=/dev/vda bs=4k count=1 conv=fsync 2>/dev/null && exit 1
        dd if=/dev/vda bs=1M 2>/dev/null | md5sum | grep {sum} || exit 1
        echo guest: read; read -r word </dev/ttyS0"
    );
    let arguments = drive_at(&path, "shared", Qemu::Backports);
    let mut arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    arguments.push("-no-reboot");
    let spec = |name| Spec { name, script: &script, arguments: &arguments, ..Spec::default() };
    let mut machines = [
        Machine::start_alone(cluster, guests, &spec("one"))?,
        Machine::start_alone(cluster, guests, &spec("other"))?,
    ];
    for machine in &mut machines {
        machine.wait_for("guest: read")?;
    }
    let stats = disk.stats()?;
    ensure!(stats["clients"] == 2, "{stats}");
    let mut io = Command::new("qemu-io");
    let refused = run(io.args(["-f", "raw", "-c", "write 0 4k"]).arg(disk.uri()), LONG)?;
    ensure!(
        !refused.status.success() && refused.stderr.contains("(qemu-system-x86"),
        "{}",
        refused.stderr
    );
    for machine in &mut machines {
        machine.say("")?;
        machine.succeed()?;
    }
    cluster
        .eventually("nobody is connected", LONG, |_| Ok(disk.status()?["stats"]["clients"] == 0))?;
    let stats = disk.stats()?;
    ensure!(stats["errors"] == 0, "{stats}");
    disk.delete()?;
    cluster.wait_until_idle(LONG)?;
    fs::remove_file(cluster.file("random"))?;
    Ok(Outcome::Passed)
}

/// Waits for each size of its drive, and uses what it has got.
const RESIZED: &str = r#"
has() { until [ $(cat /sys/block/vda/size) = $(($1 * 2048)) ]; do sleep 0.2; done; echo guest: has $1; }
said() { dd if=/dev/vda bs=1M skip=36 count=4 iflag=direct 2>/dev/null | md5sum; }
has 24
has 40
dd if=/dev/urandom of=/tmp/data bs=1M count=4 2>/dev/null
dd if=/tmp/data of=/dev/vda bs=1M seek=36 oflag=direct 2>/dev/null || exit 1
[ "$(said)" = "$(md5sum </tmp/data)" ] || exit 1
has 56
dd if=/dev/vda of=/dev/null bs=1M skip=55 count=1 iflag=direct 2>/dev/null || exit 1
echo guest: reads there
has 40
dd if=/tmp/data of=/dev/vda bs=1M seek=40 count=1 oflag=direct 2>/dev/null && exit 1
[ "$(said)" = "$(md5sum </tmp/data)" ]
"#;

/// A drive grows and shrinks under guests of either QEMU, also while QEMU is not connected, and
/// none is started again.
pub(crate) fn it_has_another_size_as_the_guest_runs(
    cluster: &Cluster,
    guests: &Guests,
) -> TestResult {
    let resize = |name: &str, size: &str| {
        let mut resize = cluster.command("volume");
        run(resize.args(["resize", name, "--size", size]), LONG)
    };
    let mut served = Vec::new();
    for (name, qemu) in [("ten", Qemu::Backports), ("seven", Qemu::Installed)] {
        let disk = Disk::create(cluster, name, "24M", &[])?;
        let arguments = drive(cluster, &disk, name, qemu)?;
        let mut arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        arguments.push("-no-reboot");
        let spec = Spec { name, script: RESIZED, arguments: &arguments, qemu, ..Spec::default() };
        served.push((name, Machine::start_alone(cluster, guests, &spec)?, disk));
    }
    for (name, machine, disk) in &mut served {
        machine.wait_for("guest: has 24")?;
        resize(name, "40M")?.expect_success("hecaton volume resize")?;
        machine.wait_for("guest: has 40")?;
        cluster.eventually("it writes beyond the old end", GUEST_PATIENCE, |_| {
            Ok(disk.stats()?["written_bytes"].as_u64() >= Some(4 << 20))
        })?;
        // Its process is killed, and another one has a volume of another size, before QEMU can
        // connect again.
        let stopped = Stopped::stop(machine.id());
        disk.kill()?;
        until("another process gives it another size", PATIENCE, || {
            let resized = resize(name, "56M")?;
            let stderr = &resized.stderr;
            // The node may learn of its end only after it has passed the order on.
            if ["its process is starting", "its process ended"]
                .iter()
                .any(|text| stderr.contains(text))
            {
                return Ok(Err(resized.stderr));
            }
            resized.expect_success("hecaton volume resize").map(Ok)
        })?;
        drop(stopped);
        machine.wait_for("guest: reads there")?;
        let refused = resize(name, "39M")?;
        ensure!(refused.status.code() == Some(1), "{}", refused.stderr);
        resize(name, "40M")?.expect_success("hecaton volume resize")?;
        machine.wait_for("guest: has 40")?;
        machine.succeed()?;
    }
    for (_, _, disk) in served {
        cluster.eventually("nobody is connected", LONG, |_| {
            Ok(disk.status()?["stats"]["clients"] == 0)
        })?;
        ensure!(disk.status()?["restarts"].as_u64() == Some(1), "{}", disk.status()?);
        disk.delete()?;
    }
    cluster.wait_until_idle(LONG)?;
    Ok(Outcome::Passed)
}

/// Random bytes, and what `md5sum` says of them.
fn random_file(cluster: &Cluster, bytes: usize) -> anyhow::Result<(PathBuf, String)> {
    let path = cluster.file("random");
    let mut random = Random(13);
    let mut contents = Vec::with_capacity(bytes);
    while contents.len() < bytes {
        contents.extend(random.next().to_le_bytes());
    }
    fs::write(&path, contents)?;
    let ended = run(Command::new("md5sum").arg(&path), LONG)?;
    ended.expect_success("md5sum")?;
    let sum = ended.text().split(' ').next().unwrap_or_default().to_owned();
    Ok((path, sum))
}

/// In the guest: its own kernel attaches the volume and swaps on it, with a program larger than the
/// guest's memory.
pub(crate) fn a_machine_swaps_on_a_volume(cluster: &Cluster, guests: &Guests) -> TestResult {
    let disk = Disk::create(cluster, "swap", "512M", &[])?;
    let uri = disk.export(&["--nbd", "127.0.0.1:0"])?;
    let port = uri.rsplit(':').next().and_then(|rest| rest.split('/').next());
    let port = port.with_context(|| format!("no port in {uri}"))?;
    let (data, sum) = random_file(cluster, 200 << 20)?;
    // QEMU's user network forwards 10.0.2.2 to the host's loopback. `dd` fills a buffer that is
    // larger than the guest's memory, and writes the buffer out. Without a memory reserve the
    // guest's kernel drops the server's answers, and waits ever longer.
    let script = format!(
        "load virtio_net nbd
        echo 16384 >/proc/sys/vm/min_free_kbytes
        ip addr add 10.0.2.15/24 dev eth0 && ip link set eth0 up || exit 1
        /bin/nbd-client -swap -N swap 10.0.2.2 {port} /dev/nbd0 || exit 1
        mkswap /dev/nbd0 >/dev/null && swapon /dev/nbd0 || exit 1
        dd if=/dev/vda bs=200M count=1 iflag=fullblock 2>/dev/null | md5sum | grep {sum} || exit 1
        awk '/^pswpout/ {{ print \"guest: swapped \" $2 }}' /proc/vmstat
        swapoff /dev/nbd0 && /bin/nbd-client -d /dev/nbd0"
    );
    let data = format!("file={},if=virtio,format=raw,readonly=on", data.display());
    let arguments = [
        "-no-reboot",
        "-drive",
        &data,
        "-netdev",
        "user,id=net",
        "-device",
        "virtio-net-pci,netdev=net",
    ];
    let spec = Spec {
        name: "swapping",
        memory: "192M",
        script: &script,
        arguments: &arguments,
        ..Spec::default()
    };
    let mut machine = Machine::start_alone(cluster, guests, &spec)?;
    let said = machine.wait_for("guest: swapped")?;
    let pages = said.rsplit(' ').next().and_then(|pages| pages.parse::<u64>().ok());
    ensure!(pages > Some((64 << 20) / 4096), "the guest has {said}");
    machine.succeed()?;
    let stats = disk.stats()?;
    ensure!(stats["errors"] == 0, "{stats}");
    cluster
        .eventually("nobody is connected", LONG, |_| Ok(disk.status()?["stats"]["clients"] == 0))?;
    disk.delete()?;
    cluster.wait_until_idle(LONG)?;
    fs::remove_file(cluster.file("random"))?;
    Ok(Outcome::Passed)
}
