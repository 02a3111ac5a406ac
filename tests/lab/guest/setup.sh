# Run in the root of a guest's image: login, network, and what makes it look like a Spark.

install -d -m 700 /root/.ssh
install -m 600 /lab/authorized_keys /root/.ssh/authorized_keys
useradd --create-home --shell /bin/bash spark
echo 'spark ALL=(ALL) NOPASSWD:ALL' >/etc/sudoers.d/spark
install -d -m 700 -o spark -g spark /home/spark/.ssh
install -m 600 -o spark -g spark /lab/authorized_keys /home/spark/.ssh/authorized_keys
ssh-keygen -A >/dev/null
# A session of systemd for every login would take seconds of this kernel.
sed -i /pam_systemd/d /etc/pam.d/common-session
printf 'UseDNS no\nGSSAPIAuthentication no\nMaxStartups 50\n' >/etc/ssh/sshd_config.d/lab.conf

network=/etc/systemd/network
mkdir -p $network
rm -f $network/*
printf '[Match]\nOriginalName=vec0\n[Link]\nName=enP7s7\n' >$network/10-management.link
for guest in 0 1 2; do
  printf '[Match]\nName=enP7s7\nHost=spark%d\n[Network]\nAddress=10.77.0.1%d/24\nGateway=10.77.0.1\nIPv6AcceptRA=no\nLinkLocalAddressing=no\n' \
    $guest $guest >$network/20-management$guest.network
done

# The MTU of its network devices cannot be raised, only be high from the start. So the devices are hidden wires at 9000, and
# the ports that the roles see are bridges of one port each, which begin at 1500 as a Spark's do and take any MTU.
wire=0
for port in enp1s0f0np0 enp1s0f1np1; do
  printf "[Match]\nOriginalName=vec%d\n[Link]\nName=wire%d\n" $((wire + 1)) $wire >$network/10-wire$wire.link
  printf '[Match]\nName=wire%d\n[Link]\nRequiredForOnline=no\n[Network]\nBridge=%s\nLinkLocalAddressing=no\nIPv6AcceptRA=no\n' \
    $wire $port >$network/15-wire$wire.network
  printf '[NetDev]\nName=%s\nKind=bridge\nMTUBytes=1500\n[Bridge]\nSTP=no\nForwardDelaySec=0\nMulticastSnooping=no\n' \
    $port >$network/15-$port.netdev
  printf "[Match]\nOriginalName=$port\n[Link]\nMACAddressPolicy=none\n" >$network/15-$port.link
  wire=$((wire + 1))
done

install -m 755 /lab/nvidia-smi /usr/bin/nvidia-smi
install -m 755 /lab/lab-rdma /lab/lab-twins /usr/local/sbin/
install -m 644 /lab/lab-rdma.service /etc/systemd/system/lab-rdma.service
systemctl --quiet enable lab-rdma

# Docker's chains need the legacy tables: this kernel has nf_tables, but not every piece of it.
update-alternatives --set iptables /usr/sbin/iptables-legacy >/dev/null
update-alternatives --set ip6tables /usr/sbin/ip6tables-legacy >/dev/null

systemctl --quiet enable systemd-networkd ssh
for unit in docker.service docker.socket containerd nfs-server earlyoom systemd-timesyncd apt-daily.timer \
  apt-daily-upgrade.timer e2scrub_reap.service; do
  systemctl --quiet disable $unit 2>/dev/null || true
done
# Cables that come up late are what the service itself must wait for: nothing at boot does it for it.
systemctl --quiet mask systemd-networkd-wait-online.service getty@tty1.service e2scrub_all.timer fstrim.timer \
  dpkg-db-backup.timer systemd-pcrphase.service
mkdir -p /var/log/journal
: >/etc/machine-id
rm -rf /var/cache/apt/archives/*.deb /var/lib/apt/lists/* /lab
