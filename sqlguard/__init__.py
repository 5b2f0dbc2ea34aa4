"""sqlguard: nothing an agent sends can destroy data that its owner can't get back."""
