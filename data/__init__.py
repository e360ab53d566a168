"""What is read or drawn, and is no experiment. It imports nothing of a script; of fast/ the threads on which toys are
drawn, since a set of them takes a minute."""
