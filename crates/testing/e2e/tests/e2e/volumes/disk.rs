//! Volumes as block devices of a host: a guest is the host, for few kernels have their driver. It
//! runs a cluster of its own, and so this is Hecaton in a machine of another kernel, too.

use crate::harness::{
    Outcome, TestResult,
    cluster::{Cluster, hecaton},
    guest::{
        Guests, Machine, Spec,
        archive::{archive, installed},
    },
    process::missing_any,
};
use std::{fs, path::Path};

const VERIFY: &str = env!("CARGO_BIN_EXE_verify-threads");

/// Fills a file system on a device while the device's process and its node are killed. After
/// `unexport`, a read-only device of the same volume must have all files.
///
/// Then kills the node and a device's process together: the next node removes the device, and a
/// read that waits ends without data. Last, a program has four times its `--local` memory on swap,
/// and the process that serves the swap is killed.
const SCRIPT: &str = r#"
load ublk_drv
cd /tmp/h || exit 1
export LD_LIBRARY_PATH=/tmp/h PATH=/tmp/h:$PATH HECATON_LOG=error
die() { echo "guest: at $*"; tail -5 /tmp/log; exit 1; }
step() { echo "guest: step $1"; }
hecaton manager --listen 127.0.0.1:7070 >/tmp/log 2>&1 &
export HECATON_MANAGER=http://127.0.0.1:7070
node() {
  hecaton node --name $1 --lend 320M --adopt-within 300 --dir /tmp/$1 --manager $HECATON_MANAGER >>/tmp/log 2>&1 &
}
v() { hecaton volume "$@" --dir /tmp/a; }
try() { i=0; until "$@" >/tmp/tried 2>&1; do i=$((i+1)); [ $i -lt 90 ] || die "$@: $(cat /tmp/tried)"; sleep 1; done; }
try wget -q -O - $HECATON_MANAGER/v1/status
node a; a=$!; node b
donors() { [ $(hecaton status --json | grep -o '"state": *"serving"' | wc -l) = 2 ]; }
try donors
held() { v unexport d --ublk 2>&1 | tee /tmp/held | grep -q "$1" || die held $(cat /tmp/held); }
# Whether there is another process than the last one that was to be killed.
fresh() { new=$(v status d --json | grep -o '"pid":[0-9][0-9]*') && [ "$new" != "$old" ]; }
kill_server() {
  for p in /proc/[0-9]*; do
    ! grep -qs volume-server $p/cmdline || kill -9 ${p#/proc/}
  done
}
kill_node() { kill -9 $a; wait $a; }
step cluster
create() { try v create d --size 96M --mirror 2 --donor-patience 600; d=$(v export d --ublk) || die export; }
create
[ -b $d ] && [ $(cat /sys/block/${d#/dev/}/size) = 196608 ] || die size
sleep 999 <$d & s=$!
held "process $s ("; kill $s
mkfs.ext4 -q $d && mount -t ext4 $d /mnt || die mkfs
held "at /mnt"
v delete d 2>/dev/null && die delete
step mounted
for n in 1 2 3 4 5 6 7 8 9; do
  dd if=/dev/urandom of=/mnt/$n bs=64k count=64 2>/dev/null && (cd /mnt; md5sum $n >>sums) || die fill
  case $n in
  3|9) try fresh; old=$new; sync & kill_server ;;
  6) sync & kill_node; node a; a=$! ;;
  7) try fresh; old=$new; kill_server ;;
  esac
  step $n
done
sync; echo 3 >/proc/sys/vm/drop_caches
c() { (cd /mnt && md5sum -c -s sums) || die sums; }
c; rm /mnt/5; sed -i '/  5$/d' /mnt/sums; fstrim /mnt || die trim
v status d --json | grep -q '"restarts":3,' || die killed
step filled
umount /mnt && e2fsck -fn $d >/dev/null 2>&1 || die fsck
v unexport d --ublk && [ ! -e $d ] || die unexport
d=$(v export d --ublk --read-only) && mount -t ext4 -o ro $d /mnt || die again
[ $(cat /sys/block/${d#/dev/}/ro) = 1 ] || die ro
c
v unexport d --ublk --force && [ ! -e $d ] || die force
umount /mnt; v delete d || die gone
step deleted
create
fio --name=d --filename=$d --thread --ioengine=psync --direct=1 --numjobs=4 --size=6M --offset_increment=16M \
  --rw=randwrite --bsrange=4k-64k --verify=crc32c --verify_fatal=1 --verify_state_save=0 >/tmp/tried 2>&1 ||
  die fio "$(tail -3 /tmp/tried)"
step verified
dd if=$d of=/dev/null bs=4k count=1 2>/dev/null || die read
kill_node; kill_server
dd if=$d bs=4k count=1 skip=999 2>/dev/null | wc -c >/tmp/late &
sleep 2; [ ! -s /tmp/late ] || die early
gone() { grep -qx 0 /tmp/late && [ ! -e $d ]; }
node a; a=$!; try gone
step gone
mkdir -p /sys/fs/cgroup && mount -t cgroup2 none /sys/fs/cgroup || die cgroup
mkfifo /tmp/in; verify='verify-threads 2 8192'
try donors
hecaton run --via swap --name s --local 16M --swap 112M --dir /tmp/a -- $verify </tmp/in & s=$!
exec 8>/tmp/in
used() { awk '/ublkb/ { print int($4 / 1024) }' /proc/swaps; }
i=0; until [ "$(used)" -gt 30 ] 2>/dev/null; do i=$((i+1)); [ $i -lt 200 ] || die swap $(used); sleep 1; done
step swapped
kill_server; sleep 3; exec 8>&-
wait $s || die verify
grep -q ublkb /proc/swaps && die swapoff
ls /dev/ublkb* 2>/dev/null && die device
[ "$(v list --json)" = '[]' ] || die volume
"#;

/// Stages of [`SCRIPT`], in their order. Each may take as long as a guest may for anything.
const STEPS: &[&str] = &[
    "cluster", "mounted", "1", "2", "3", "4", "5", "6", "7", "8", "9", "filled", "deleted",
    "verified", "gone", "swapped",
];

/// See [`SCRIPT`].
pub(crate) fn a_file_system_outlives_what_is_killed(
    cluster: &Cluster,
    guests: &Guests,
) -> TestResult {
    if let Some(reason) = missing_any(&["tar", "ldd", "mkswap", "swapon", "fio"]) {
        return Ok(Outcome::Skipped(reason));
    }
    let hecaton = hecaton()?;
    let tools = ["mkswap", "swapon", "swapoff", "fio"].map(installed);
    let tools = tools.into_iter().collect::<anyhow::Result<Vec<_>>>()?;
    let programs: Vec<&Path> = [hecaton.as_path(), Path::new(VERIFY)]
        .into_iter()
        .chain(tools.iter().map(|tool| &**tool))
        .collect();
    let archive = archive(cluster, "h", &programs, SCRIPT)?;
    let drive = format!("file={},if=virtio,format=raw,readonly=on", archive.display());
    let spec = Spec {
        name: "disks",
        memory: "1400M",
        // The kernel's command line has no room for all of it.
        script: "tar -xf /dev/vda -C /tmp && exec sh /tmp/h/script",
        arguments: &["-no-reboot", "-drive", &drive],
        ..Spec::default()
    };
    let mut machine = Machine::start_alone(cluster, guests, &spec)?;
    for step in STEPS {
        machine.wait_for(&format!("guest: step {step}"))?;
    }
    machine.succeed()?;
    fs::remove_file(archive)?;
    Ok(Outcome::Passed)
}
