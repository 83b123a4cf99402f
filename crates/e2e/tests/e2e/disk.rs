//! Volumes as block devices of a host: a guest is the host, for few kernels have their driver. It runs a cluster of its
//! own, and so this is Hecaton in a machine of another kernel, too.

use crate::{
    cluster::{Cluster, LONG, hecaton, succeed},
    guest::{Machine, Spec, guests},
    harness::{Outcome, TestResult},
    process::{missing, run},
};
use anyhow::{Context as _, ensure};
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// Fills a file system on a device whose process is killed again and again, takes the device away, and finds all
/// of it on another one that is to be read only.
const SCRIPT: &str = r#"
load ublk_drv
cd /tmp/h || exit 1
export LD_LIBRARY_PATH=/tmp/h HECATON_LOG=error
./hecaton dev --donors 2 --lend 320M --dir /tmp/d >/tmp/log 2>&1 &
v() { ./hecaton volume "$@" --dir /tmp/d; }
die() { echo "guest: at $*"; tail -5 /tmp/log; exit 1; }
i=0; until v list >/dev/null 2>&1; do i=$((i+1)); [ $i -lt 90 ] || die start; sleep 1; done
held() { v unexport d --ublk 2>&1 | tee /tmp/held | grep -q "$1" || die held $(cat /tmp/held); }
kill_server() {
  for p in /proc/[0-9]*; do
    ! grep -qs volume-server $p/cmdline || kill -9 ${p#/proc/}
  done
}
v create d --size 96M --mirror 2 --donor-patience 600 && d=$(v export d --ublk) || die export
[ -b $d ] && [ $(cat /sys/block/${d#/dev/}/size) = 196608 ] || die size
sleep 999 <$d & s=$!
held "process $s ("; kill $s
mkfs.ext4 -q $d && mount -t ext4 $d /mnt || die mkfs
held "at /mnt"
v delete d 2>/dev/null && die delete
for i in 1 2 3 4 5 6 7 8 9; do
  dd if=/dev/urandom of=/mnt/$i bs=64k count=64 2>/dev/null && (cd /mnt; md5sum $i >>sums) || die fill
  [ $((i%3)) != 0 ] || { sync & kill_server; }
done
sync; echo 3 >/proc/sys/vm/drop_caches
c() { (cd /mnt && md5sum -c -s sums) || die sums; }
c; rm /mnt/5; sed -i '/  5$/d' /mnt/sums; fstrim /mnt || die trim
v status d --json | grep -q '"restarts":3,' || die killed
umount /mnt && e2fsck -fn $d >/dev/null 2>&1 || die fsck
v unexport d --ublk && [ ! -e $d ] || die unexport
d=$(v export d --ublk --read-only) && mount -t ext4 -o ro $d /mnt || die again
[ $(cat /sys/block/${d#/dev/}/ro) = 1 ] || die ro
c
v unexport d --ublk --force && [ ! -e $d ] || die force
umount /mnt; v delete d || die gone
"#;

/// See [`SCRIPT`].
pub(crate) fn a_file_system_outlives_what_is_killed(cluster: &Cluster) -> TestResult {
    if let Some(reason) = missing("tar").or_else(|| missing("ldd")) {
        return Ok(Outcome::Skipped(reason));
    }
    let guests = guests!();
    let archive = archive(cluster)?;
    let drive = format!("file={},if=virtio,format=raw,readonly=on", archive.display());
    let spec = Spec {
        name: "disks",
        memory: "1400M",
        // The kernel's command line has no room for all of it.
        script: "tar -xf /dev/vda -C /tmp && exec sh /tmp/h/script",
        arguments: &["-no-reboot", "-drive", &drive],
        ..Spec::default()
    };
    let mut machine = Machine::start_alone(cluster, &guests, &spec)?;
    machine.succeed()?;
    fs::remove_file(archive)?;
    Ok(Outcome::Passed)
}

/// The command with the libraries that it needs, and the script.
fn archive(cluster: &Cluster) -> anyhow::Result<PathBuf> {
    let dir = cluster.dir("h")?;
    let hecaton = hecaton()?;
    let ended = succeed(Command::new("ldd").arg(&hecaton))?;
    let said = ended.text();
    let libraries = said.lines().filter_map(|line| line.split(" => ").nth(1)?.split(' ').next());
    let files: Vec<&Path> = libraries.map(Path::new).chain([hecaton.as_path()]).collect();
    ensure!(files.len() > 1, "ldd says {said}");
    for file in files {
        let name = file.file_name().with_context(|| format!("{} has no name", file.display()))?;
        fs::copy(file, dir.join(name))?;
    }
    fs::write(dir.join("script"), SCRIPT)?;
    let archive = cluster.file("h.tar");
    let parent = dir.parent().context("a directory within another")?;
    let mut tar = Command::new("tar");
    tar.arg("-cf").arg(&archive).arg("-C").arg(parent).arg("h");
    run(&mut tar, LONG)?.expect_success("tar")?;
    fs::remove_dir_all(dir)?;
    Ok(archive)
}
