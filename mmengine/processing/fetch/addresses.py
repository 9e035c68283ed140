"""Decides which IP addresses untrusted URLs may reach. Only public addresses are allowed."""

import ipaddress
import socket
from collections.abc import Callable
from contextlib import closing, suppress

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
AddressPolicy = Callable[[IPAddress], bool]

# The complete IANA registry of special-purpose addresses. `ipaddress.is_global` differs between Python
# versions, and accepts some addresses that lead to special services.
_SPECIAL_4 = tuple(
    map(
        ipaddress.IPv4Network,
        (
            *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12"),
            *("192.0.0.0/24", "192.0.2.0/24", "192.31.196.0/24", "192.52.193.0/24", "192.88.99.0/24"),
            *("192.168.0.0/16", "192.175.48.0/24", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24"),
            *("224.0.0.0/4", "240.0.0.0/4"),
            "168.63.129.16/32",  # Azure's platform service, reachable from each of its virtual machines.
        ),
    )
)
_UNICAST_6 = ipaddress.IPv6Network("2000::/3")  # The only public range.
_SPECIAL_6 = tuple(
    map(
        ipaddress.IPv6Network,
        (
            *("2001::/23", "2001:db8::/32", "2620:4f:8000::/48", "3fff::/20"),
            "2002::/16",  # 6to4: a wrapped IPv4 address; no longer in service.
        ),
    )
)
_MAPPED = ipaddress.IPv6Network("::ffff:0:0/96")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")  # The well-known NAT64 prefix (RFC 6052).
_LOW_32 = 2**32 - 1
_ANY_PORT = 9


def is_public(address: IPAddress) -> bool:
    """Return whether the address is public: neither in a private network nor on this machine.

    IPv4 addresses inside mapped and NAT64 addresses are checked as IPv4. All other IPv6 forms of IPv4
    addresses are refused: compatible addresses, 6to4, Teredo, and a network's own NAT64 prefix.
    """
    address = unwrapped(address)
    if isinstance(address, ipaddress.IPv4Address):
        is_special = any(address in network for network in _SPECIAL_4)
    elif address.scope_id is not None or address not in _UNICAST_6:
        return False
    else:
        is_special = any(address in network for network in _SPECIAL_6)
    return not is_special and address.is_global and not address.is_multicast and not _is_ours(address)


def unwrapped(address: IPAddress) -> IPAddress:
    """Return the IPv4 address inside a mapped or NAT64 address, and any other address unchanged."""
    if isinstance(address, ipaddress.IPv6Address) and (address in _MAPPED or address in _NAT64):
        return ipaddress.IPv4Address(int(address) & _LOW_32)
    return address


def _is_ours(address: IPAddress) -> bool:
    """Return whether the address belongs to this machine.

    If this machine owns the address, packets to the address also have it as their source address. Connecting
    a UDP socket reveals the source address without sending a packet.
    """
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with suppress(OSError), closing(socket.socket(family, socket.SOCK_DGRAM)) as probe:
        probe.connect((str(address), _ANY_PORT))
        return ipaddress.ip_address(probe.getsockname()[0].partition("%")[0]) == address
    return False  # There is no route to the address.
